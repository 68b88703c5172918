"""Claims about the tuner: the grid, what is chosen, and what a candidate's process measures."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tune_engine
from benchmarks.tune_engine import (
    COLUMNS,
    NOISE,
    Candidate,
    TuneSettings,
    candidates_of,
    choose,
    measure_candidates,
    table_rows,
    varied_axes,
)
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.child import ChildResult
from entente.telemetry.errors import InputError


@pytest.fixture
def base(tmp_path: Any) -> RunSettings:
    return layered_settings("laptop", (), {"runs_root": tmp_path})


def grid(base: RunSettings, **axes: Any) -> list[Candidate]:
    return candidates_of(base, TuneSettings.model_validate({"max_sequences": (), "max_batched_tokens": ()} | axes))


def figures(rate: float, *, p99: float = 1000.0, hit: float = 0.5, spread: float = 0.01) -> dict[str, Any]:
    latency = {"latency_ms_p99": p99, "first_token_ms": 1.0}
    return {"decisions_per_s": rate, "tokens_per_s": rate, "cache_hit": hit, "spread": spread, **latency}


def test_the_grid_holds_every_combination_and_the_current_settings_first_and_once(base: RunSettings):
    candidates = grid(base, max_sequences=(128, 256, 512), max_batched_tokens=(4096, 8192), gpu_memory_utilization=(0.5, 0.85))
    assert len(candidates) == 12 and [each.current for each in candidates] == [True] + [False] * 11
    assert varied_axes(candidates) == ["max_sequences", "max_batched_tokens", "gpu_memory_utilization"]
    beside = grid(base, max_sequences=(256,))
    assert [each.settings.max_sequences for each in beside] == [base.inference.max_sequences, 256]


def test_what_does_not_fit_beside_the_runs_trainer_is_left_out_and_told(
    base: RunSettings, monkeypatch: pytest.MonkeyPatch, said: list
):
    """On one shared card a share of 0.9 would be the fastest, and its run refused."""

    def check_room(settings: RunSettings, *, trains: bool) -> None:
        if trains and settings.inference.gpu_memory_utilization > 0.8:
            raise InputError("lower the share to 0.73")

    monkeypatch.setattr(tune_engine, "check_room", check_room)
    shares = [each.settings.gpu_memory_utilization for each in grid(base, gpu_memory_utilization=(0.5, 0.85, 0.9))]
    assert shares == [base.inference.gpu_memory_utilization, 0.5]
    assert len(said) == 1 and "gpu_memory_utilization 0.9, which no run could use: lower the share to 0.73" in said[0]


def test_a_candidate_is_measured_with_the_threads_of_the_files_that_the_run_goes_on_with(
    base: RunSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    jobs = list[Mapping[str, Any]]()

    async def run_child(module: str, job: Mapping[str, Any], log: Path, *, limit_s: float) -> ChildResult:
        jobs.append(job)
        return ChildResult(answer=None, why="it was not run")

    monkeypatch.setattr(tune_engine, "run_child", run_child)
    monkeypatch.setattr("entente.settings.run_settings.usable_cores", lambda: 8)
    with_file = base.model_copy(update={"inference": base.inference.model_copy(update={"threads": 6})})
    asyncio.run(measure_candidates(with_file, TuneSettings(), grid(with_file), tmp_path))
    assert [job["threads"] for job in jobs] == [6]


def test_what_is_chosen_is_the_fastest_within_latency_and_cache_hits(base: RunSettings):
    candidates, tuning = grid(base, max_sequences=(16, 32, 64, 256)), TuneSettings()
    current, dead, late, cold, best = candidates
    found = {
        current: figures(100),
        late: figures(400, p99=13_001),
        cold: figures(400, hit=0.29),
        best: figures(200),
    }
    chosen, _ = choose(found, tuning)
    assert chosen is best
    rows = table_rows(candidates, found, {dead: ChildResult(answer=None, why="it died")}, chosen, tuning)
    assert [row["note"] for row in rows] == ["misses", "misses", "chosen", "", "it died"]
    assert choose({late: found[late]}, tuning)[0] is None and choose({}, tuning)[0] is None


@pytest.mark.parametrize(
    ("rate", "spread", "stays"),
    [
        pytest.param(100 * (1 + NOISE / 2), 0.0, True, id="hardly faster"),
        pytest.param(130.0, 0.4, True, id="faster by less than passes differ"),
        pytest.param(130.0, 0.1, False, id="faster by more"),
    ],
)
def test_the_current_settings_give_way_only_to_a_gain_beyond_noise(base: RunSettings, rate: float, spread: float, stays: bool):
    current, other = grid(base, max_sequences=(64,))
    chosen, _ = choose({current: figures(100), other: figures(rate, spread=spread)}, TuneSettings())
    assert (chosen is current) is stays


def test_what_vllm_does_not_measure_is_an_empty_cell(base: RunSettings):
    (current,) = grid(base)
    (row,) = table_rows([current], {current: figures(100) | {"first_token_ms": None}}, {}, current, TuneSettings())
    assert [head for head in COLUMNS if not row[head]] == ["first token ms"]
