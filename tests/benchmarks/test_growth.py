"""How costs grow is read from a real run, a real index and real processes."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.entente_run import RunFigures
from benchmarks.growth import rollouts as growing_rollouts
from benchmarks.growth import rows
from benchmarks.growth.bench import AXES, ROLLOUT_AXES, Inputs, check_wanted, setting_by_rollouts
from benchmarks.growth.rollouts import SIZES, sizes_of, unique_share
from benchmarks.growth.rows import ask, make, measure, measure_rows
from benchmarks.growth.steps import (
    FIGURES,
    files_of,
    measure_steps,
    memory_growth_mb,
    processes_mb,
    step_figures,
)
from benchmarks.old_way.arm import Setting
from benchmarks.storage_rows import decisions_of, plies_of
from cli.bench_growth import growth_table
from game.prompt_settings import PromptSettings
from inference.settings import InferenceSettings
from pipeline.run_settings import layered_settings
from records.rows import Decision
from reports.growth import Growth
from rollouts.settings import RolloutSettings
from storage.index import Index
from storage.runs import RunPaths
from storage.shards import publish_shard
from telemetry.errors import InputError
from training.settings import TrainingSettings

_MIB = 2**20 / 1e6


def test_memory_of_a_real_child_counts_what_its_own_child_holds():
    hold = "held = bytearray(b'x') * 60_000_000; print('held', flush=True); input()"
    code = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-S', '-c', {hold!r}], stdin=subprocess.PIPE)\n"
        "sys.stdin.readline(); child.communicate(b'x')"
    )
    parent = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "held\n"
        assert 60 < processes_mb(parent.pid)["processes_mb"] < 120
    finally:
        parent.communicate("x\n")


def test_files_are_counted_in_all_folders_with_their_bytes(tmp_path: Path):
    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "a").write_bytes(b"x" * 1_000_000)
    (tmp_path / "one" / "two" / "b").write_bytes(b"x" * 500_000)
    os.symlink(tmp_path / "a", tmp_path / "one" / "link")
    number, mb = files_of(tmp_path)
    assert number == 3 and mb == pytest.approx(1.5, abs=0.001), "the target of a link counts once"


def run_of(steps: int) -> RunFigures:
    """Step n takes n seconds and 2 CPU seconds, the flow has n MiB and the trainer 100 n; the first step took an hour."""
    memory = [{"memory/flow_mib": float(n), "memory/trainer_mib": 100.0 * n} for n in range(1, steps + 1)]
    times = [{"time/step_s": 3600.0 if n == 0 else n + 1.0} for n in range(steps)]
    figures = [time | held for time, held in zip(times, memory, strict=True)]
    return RunFigures(steps=figures, cpu_s=[50.0 + 2 * n for n in range(steps)], summary={}, lags=[])


def test_the_figures_of_a_step_are_medians_of_the_steps_before_it():
    found = step_figures(run_of(40), 20)
    assert found["step_s"] == 15.5, "steps 11 to 20"
    assert found["cpu_s"] == pytest.approx(2)
    assert found["flow_mb"] == pytest.approx(15.5 * _MIB) and found["trainer_mb"] == pytest.approx(1550 * _MIB)
    assert step_figures(run_of(2), 2)["step_s"] == 2, "the first step never counts"


def test_growth_of_memory_is_of_flow_and_trainer_together_from_the_settled_step_on():
    assert memory_growth_mb(run_of(200), 30, 200) == pytest.approx((200 - 30) * 101 * _MIB)


def test_rows_are_measured_on_an_index_of_that_size(tmp_path: Path):
    run, n = tmp_path / "run", 210_000
    found = make(run, n, 0) | ask(run, 1, 0)
    index = Index(RunPaths(run))
    assert index.refresh() == n and index.refused == []
    assert index.fetch("SELECT count(*), max(step) FROM batches") == [(n // 10, 42)], "a tenth of the rows was trained on"
    found |= measure(run, 1, 0)
    assert set(found) == set(rows.FIGURES)
    assert all(value > 0 for name, value in found.items() if name != "index_mb")


def test_a_size_that_the_disk_is_too_small_for_is_left_out_with_a_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rows, "DISK_BYTES_PER_ROW", 10**15)
    said: list[str] = []
    monkeypatch.setattr(rows, "reporter", lambda: type("Said", (), {"say": said.append, "stage": lambda *_: None})())
    assert measure_rows([10_000], rounds=1, seed=0).points == {}
    assert said and said[0].startswith("10,000 rows are left out: they need 10000000000 GB of disk")


def of_two_ids(row: Decision) -> Decision:
    """The row, with two legal ids at each position of its completion: the drawn one and another."""
    drawn = row.input_ids[row.prompt_len :]
    return replace(
        row,
        legal_ids=np.stack([drawn, drawn + 1], axis=1).ravel(),
        legal_offsets=np.arange(0, 2 * len(drawn) + 1, 2, dtype=np.int32),
    )


def test_the_unique_share_is_that_of_the_rows_a_step_would_choose(tmp_path: Path):
    """Forks of a start group share prompts of 440 tokens, and add completions of 24: about (440 + 6 * 24) / (6 * 464)."""
    paths = RunPaths(tmp_path).create()
    decisions = [of_two_ids(row) for row in decisions_of(range(2), 0)]
    publish_shard(paths, "bench", 0, decisions, plies_of(range(2)), {})
    assert unique_share(paths, 2, 0)["unique_share"] == pytest.approx((440 + 6 * 24) / (6 * 464), rel=0.1)


def test_rollouts_grow_with_the_size_of_each_axis(model: Path, positions, uniform_engine, tmp_path: Path, monkeypatch):
    """Real games and rows; only the engine draws at random, so that no vLLM has to start."""
    monkeypatch.setattr("benchmarks.rollout.engine_of", lambda *_: uniform_engine())
    emptied: list[object] = []

    async def forget_prefixes(engine: object) -> None:
        emptied.append(engine)

    monkeypatch.setattr("benchmarks.rollout.forget_prefixes", forget_prefixes)
    small = {axis: {size: made for size, made in sizes.items() if size <= 8} for axis, sizes in SIZES.items()}
    monkeypatch.setattr(growing_rollouts, "SIZES", small | {"horizon": {1: {"horizon_years": 1}}})

    def setting_of(rollouts: Mapping[str, object]) -> Setting:
        changed = {"start_groups": 2, "forks_per_group": 4, "horizon_years": 1, **rollouts}
        return Setting(
            compact_model=model,
            json_model=model,
            positions=positions,
            rollouts=RolloutSettings.model_validate(changed),
            training=TrainingSettings(),
            inference=InferenceSettings(),
            prompts=PromptSettings(own_line="in_place" if rollouts.get("policy_powers") == "all" else "last"),
            folder=tmp_path,
        )

    forks, powers = growing_rollouts.measure_rollouts(["forks", "powers"], setting_of, rounds=1, quick=False)
    assert {axis.axis: list(axis.points) for axis in (forks, powers)} == {"forks": [4, 8], "powers": [1, 7]}
    assert len(emptied) == 2 + 4 and len(set(map(id, emptied))) == 2, "warm-ups and sizes; an engine for each form of prompts"
    assert 1.5 < forks.points[8]["decisions"] / forks.points[4]["decisions"] < 2.5
    assert powers.points[7]["decisions"] > 3 * powers.points[1]["decisions"]
    for point in (*forks.points.values(), *powers.points.values()):
        assert point["cpu_s"] > 0 and 0 < point.get("unique_share", 0.5) < 1, "absent where no return differs"
        assert point["cpu_ms_a_decision"] == pytest.approx(1000 * point["cpu_s"] / point["decisions"])


def test_each_number_of_powers_has_the_prompts_of_such_a_run_and_the_model_made_for_them(monkeypatch, tmp_path: Path):
    def made_for(root: Path, recipe: Any, *, prompts: PromptSettings) -> Path:
        return tmp_path / prompts.own_line

    monkeypatch.setattr("training.tiny_model.make_tiny_model", made_for)
    monkeypatch.setattr("state_cache.store.open_cache", lambda folder: SimpleNamespace(train=[]))
    setting_of = setting_by_rollouts(Inputs(settings=layered_settings("laptop"), arguments=(), cache=lambda: tmp_path), tmp_path)
    one, seven = (setting_of(SIZES["powers"][powers]) for powers in (1, 7))
    assert (one.prompts.own_line, one.compact_model.name) == ("last", "last")
    assert (seven.prompts.own_line, seven.compact_model.name) == ("in_place", "in_place")
    assert seven.rollouts == one.rollouts.model_copy(update={"policy_powers": "all"})


def test_axes_and_sizes_fit_the_settings():
    assert set(SIZES) == set(ROLLOUT_AXES) and check_wanted([]) == list(AXES)
    assert check_wanted(["horizon", "steps"]) == ["steps", "horizon"]
    for axis, sizes in SIZES.items():
        assert set(sizes_of(axis, quick=True)) <= set(sizes_of(axis, quick=False)) == set(sizes)
        for changed in sizes.values():
            assert layered_settings("laptop", overrides={"rollouts": dict(changed)})
    with pytest.raises(InputError, match="not measured by 'depth', but by steps, rows, forks, powers, horizon"):
        check_wanted(["depth"])


def test_the_table_has_a_line_for_each_figure_and_leaves_out_what_was_not_counted():
    steps = Growth(axis="steps", figures={"s": "time, s", "mb": "PSS, MB"}, points={20: {"s": 2.0}, 200: {"s": 20.0}})
    table = growth_table([steps, Growth(axis="powers", figures={"n": "number"}, points={1: {"n": 1234.0}})])
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["steps", "time, s", "PSS, MB", "powers", "number"]
    assert cells[1] == ["20", "2", "", "1", "1,234"]
    assert cells[3] == ["exponent", "1.00", "", "exponent", ""] and cells[2][3:] == ["", ""]


@pytest.mark.slow
def test_a_real_run_is_measured_at_its_steps(workplace, trained):
    config = str(workplace.folder / "small.toml")
    growth, grown_mb = measure_steps(["--config", config], workplace.folder / "runs", (2, 4), settled=2)
    assert set(growth.points) == {2, 4} and grown_mb is not None and abs(grown_mb) < 500
    for point in growth.points.values():
        assert set(point) == set(FIGURES) and all(value > 0 for value in point.values())
    assert growth.points[2]["files"] < growth.points[4]["files"]
    assert list((workplace.folder / "runs").glob("bench-growth-*")) == [], "nothing is left behind"
