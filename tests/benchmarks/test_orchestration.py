"""What orchestration costs is measured on tasks that a server really saw, and on figures of steps that were really made."""

import pytest

from benchmarks.entente_run import RunFigures
from benchmarks.orchestration import (
    TARGETS,
    ServedRun,
    bench_orchestration,
    completed,
    idle_figures,
    run_empty_tasks,
    share_figures,
    simulated,
)
from telemetry.errors import DataError


def step(**times: float) -> dict[str, float]:
    return {f"time/{name}": seconds for name, seconds in times.items()}


@pytest.mark.system
def test_a_server_sees_every_empty_task_completed(prefect_server: str):
    found = run_empty_tasks(prefect_server, 5)
    assert found["tasks"] == 5 and found["seconds"] > 0 and found["cpu_s"] > 0
    assert completed(prefect_server, found["flow_run"]) <= found["all_tasks"] == 13
    assert completed(prefect_server) >= completed(prefect_server, found["flow_run"])


@pytest.mark.system
def test_a_server_that_is_not_there_is_said_in_one_sentence():
    with pytest.raises(DataError, match=r"^empty tasks failed: "):
        run_empty_tasks("http://127.0.0.1:9/api", 1)


def served(steps: int, *, tree_s: float, server_s: float, tasks: int) -> ServedRun:
    """A run whose processes, without the server, have spent `tree_s` CPU seconds a step."""
    cpu_s = [7.0 + tree_s * number for number in range(steps)]
    return ServedRun(figures=RunFigures(steps=[{}] * steps, cpu_s=cpu_s, summary={}, lags=[]), server_cpu_s=server_s, tasks=tasks)


def test_prefects_share_is_of_the_cpu_time_of_all_processes_in_the_further_steps():
    """By hand: 10 steps more have 20 tasks of 5 ms in the client and 0.3 s in the server, beside 1.97 s a step of all others."""
    short = served(2, tree_s=1.97, server_s=1.0, tasks=30)
    found = share_figures(short, served(12, tree_s=1.97, server_s=1.3, tasks=50), client_ms=5.0)
    assert found["prefect_tasks_per_step"] == pytest.approx(2)
    assert found["prefect_client_cpu_ms_per_step"] == pytest.approx(10)
    assert found["prefect_server_cpu_ms_per_step"] == pytest.approx(30)
    assert found["orchestration_cpu_share"] == pytest.approx(0.04 / 2.0)


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
