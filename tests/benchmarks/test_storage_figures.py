"""The figures of the trajectory store are of what they say, whatever the clock shows."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import storage_figures
from benchmarks.storage_figures import TARGETS, bench_storage
from benchmarks.storage_rows import FORKS, ROWS_PER_START_GROUP, VERSIONS, decisions_of, plies_of
from cli import main
from storage.index import Index
from storage.schema import check_tokens, to_table
from telemetry.errors import DataError, InputError

SMALL = 0.005


def test_times_are_put_together_as_their_names_say(monkeypatch: pytest.MonkeyPatch):
    """With a clock that only the measured work moves."""
    now = 0.0

    def slow(owner: Any, name: str, seconds: Callable[..., float]) -> None:
        work = getattr(owner, name)

        def slowed(*given: Any, **named: Any) -> Any:
            nonlocal now
            now += seconds(*given)
            return work(*given, **named)

        monkeypatch.setattr(owner, name, slowed)

    def run_of(index: Index) -> str:
        return index._paths.root.parent.name if index._paths.root.name == "run" else index._paths.root.name

    slow(Index, "select_batch", lambda index, query: {"few": 0.5, "many": 2.0}.get(run_of(index), 4.0))
    slow(Index, "refresh", lambda index: {"few": 1.0, "many": 7.0}.get(run_of(index), 0.25))
    slow(Index, "gather", lambda index, rows: 1.0)
    slow(storage_figures, "_plain_copy", lambda target, source: 0.125)
    slow(storage_figures._OldWays, "from_json", lambda *given: 50.0)
    slow(storage_figures._OldWays, "from_parquet", lambda *given: 200.0)
    slow(storage_figures, "publish_shard", lambda *given: 16.0)
    slow(storage_figures, "row_checksums", lambda table: 0.5)
    slow(storage_figures, "write_ledger", lambda *given: 0.375)
    monkeypatch.setattr("benchmarks.outcome.time.perf_counter", lambda: now)
    monkeypatch.setattr("benchmarks.outcome.time.process_time", lambda: now)
    metrics = dict(bench_storage(rounds=2, scale=SMALL).metrics)
    assert metrics.pop("heap_bytes_per_gb_mapped") == 0
    assert metrics == {
        "scale": SMALL,
        "select_1e6_ms": 2000.0,
        "select_1e6_over_1e4": 4.0,
        "regroup_1e6_s": 7.0,
        "open_1e5_s": 0.25,
        "attach_ms": 250.0,
        "ledger_ms": 375.0,
        "write_crc_cost_share": 1 / 16,
        "gather_ms": 1000.0,
        "gather_over_memcpy": 8.0,
        "gather_vs_json": 50.0,
        "gather_vs_parquet": 200.0,
    }


def test_a_selection_that_finds_nothing_gives_no_figure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage_figures, "VERSIONS", 10 * VERSIONS)  # the trainer is far ahead of every row
    with pytest.raises(DataError, match="did not find a selection among the rows of few"):
        bench_storage(rounds=1, scale=SMALL)


@pytest.mark.parametrize("way", ["from_json", "from_parquet"])
def test_an_old_way_that_reads_other_tokens_gives_no_figure(monkeypatch: pytest.MonkeyPatch, way: str):
    monkeypatch.setattr(storage_figures, "_selecting", lambda *given: {})
    monkeypatch.setattr(storage_figures, "_opening", lambda *given: {})
    monkeypatch.setattr(storage_figures._OldWays, way, lambda ways, rows: np.zeros(3, np.int32))
    with pytest.raises(DataError, match=f"the same tokens read by {way.removeprefix('from_')}"):
        bench_storage(rounds=1, scale=SMALL)


@pytest.mark.parametrize("given", [{"rounds": 0}, {"scale": 0.0}, {"scale": 2.0}], ids=str)
def test_nothing_to_measure_is_the_users_mistake(given: dict[str, Any]):
    with pytest.raises(InputError, match="nothing to measure"):
        bench_storage(**given)


def test_the_last_line_is_one_object_with_every_target(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "storage", "--scale", str(SMALL), "--rounds", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["benchmark"] == "storage" and set(told["targets"]) == set(TARGETS) <= set(told["metrics"])
    assert {"select_1e6_ms", "gather_vs_parquet"} <= set(told["scaled_down"]) and "attach_ms" not in told["scaled_down"]
    assert all(math.isfinite(value) and value >= 0 for value in told["metrics"].values())


def test_rows_have_the_shape_that_rollouts_have():
    rows = decisions_of(range(3), seed=1, version=5)
    assert len(rows) == 3 * ROWS_PER_START_GROUP and len(plies_of(range(3))) == 3 * FORKS
    check_tokens(to_table(rows))
    prompts = {(row.start_group, row.power, tuple(row.input_ids[: row.prompt_len])) for row in rows}
    assert len(prompts) == 3 * 7, "forks share their prompt, powers and start groups do not"
    assert 400 < np.mean([row.prompt_len for row in rows]) < 480
    assert 18 < np.mean([len(row.behaviour_logprobs) for row in rows]) < 30
