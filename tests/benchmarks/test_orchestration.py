"""What orchestration costs is measured on tasks that a server really saw, and on figures of steps that were really made."""

import pytest

from benchmarks.orchestration import (
    START_GROUPS,
    TARGETS,
    bench_orchestration,
    completed,
    idle_figures,
    run_empty_tasks,
    simulated,
    step_figures,
)
from telemetry.errors import DataError


def step(**times: float) -> dict[str, float]:
    return {f"time/{name}": seconds for name, seconds in times.items()}


@pytest.mark.system
def test_a_server_sees_every_empty_task_completed(prefect_server: str):
    found = run_empty_tasks(prefect_server, 5)
    assert found["tasks"] == 5 and found["seconds"] > 0 and found["cpu_s"] > 0
    assert completed(prefect_server, found["flow_run"]) <= found["all_tasks"] == 13


@pytest.mark.system
def test_a_server_that_is_not_there_is_said_in_one_sentence():
    with pytest.raises(DataError, match=r"^empty tasks failed: "):
        run_empty_tasks("http://127.0.0.1:9/api", 1)


def test_shares_are_medians_over_steps_without_the_first():
    steps = [step(orchestration_s=9, orchestration_share=0.9, step_s=10)]
    steps += [step(orchestration_s=cost, orchestration_share=cost / 2, step_s=2) for cost in (0.02, 0.04, 0.3)]
    found = step_figures(steps, "threads")
    assert found["orchestration_share"] == 0.02 and found["laptop_step_s"] == 2
    assert found["ms_per_step_threads"] == pytest.approx(40)
    assert found["ms_per_start_group_threads"] == pytest.approx(40 / START_GROUPS)


def test_a_trainer_s_waiting_counts_from_the_step_before_which_something_could_be_played_ahead():
    steps = [step(trainer_wait_s=wait, step_s=2) for wait in (2, 1, 1, 0.02, 0.04, 0.06)]
    assert idle_figures(steps)["trainer_idle_share_spare_capacity"] == pytest.approx(0.02)


@pytest.mark.parametrize("depth", [0, 2])
def test_simulated_runs_replay_the_laptop_run_under_a_policy_that_stays_the_base(depth: int):
    from pipeline.run_settings import layered_settings

    words = dict(zip(simulated(3, depth=depth), simulated(3, depth=depth)[1:], strict=False))
    assert (words["--simulated.from-run"], words["--pipeline.buffer-depth"]) == ("laptop", str(depth))
    assert ("--pipeline.no-deterministic" in words) == bool(depth)
    overrides = {
        "simulated": {"from_run": "laptop", "rate": float(words["--simulated.rate"])},
        "pipeline": {"buffer_depth": depth, "deterministic": not depth},
        "training": {"learning_rate": float(words["--training.learning-rate"])},
    }
    assert layered_settings("laptop", overrides=overrides).simulated.rate == 3


@pytest.mark.slow
def test_the_whole_benchmark_has_a_figure_for_every_target():
    outcome = bench_orchestration(tasks=30, rounds=1, steps=5, slow_steps=1, slow_step_s=4)
    assert set(outcome.targets) == set(TARGETS)
    assert all(value == value and value >= 0 for value in outcome.metrics.values())
    assert outcome.metrics["slow_step_s"] == pytest.approx(4, abs=3)
