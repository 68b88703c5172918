"""The figures of the trajectory store are of what they say, whatever the clock shows."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import storage_figures
from benchmarks.storage_figures import bench_storage
from entente.telemetry.errors import DataError
from storage.index import Index

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
    slow(storage_figures, "write_ledger", lambda *given: 0.375)
    monkeypatch.setattr("benchmarks.outcome.time.perf_counter", lambda: now)
    monkeypatch.setattr("benchmarks.outcome.time.process_time", lambda: now)
    metrics = dict(bench_storage(rounds=2, scale=SMALL).metrics)
    assert metrics == {
        "scale": SMALL,
        "choose_1e6_ms": 2000.0,
        "choose_1e6_over_1e4": 4.0,
        "open_budget_of_1e6_s": 7.0,
        "attach_ms": 250.0,
        "ledger_ms": 375.0,
        "gather_ms": 1000.0,
    }


def test_a_selection_that_finds_nothing_gives_no_figure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage_figures, "STEP_SHARDS", 0)
    with pytest.raises(DataError, match="did not find a selection among the rows of few"):
        bench_storage(rounds=1, scale=SMALL)
