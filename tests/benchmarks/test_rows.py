"""The figures of a growing past are what their names say, of a run that has the past."""

import json
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.growth import rows as growing
from benchmarks.growth.rows import measure_rows
from benchmarks.rows import SIZES, TARGETS, bench_rows
from benchmarks.storage_figures import empty_shards
from benchmarks.storage_rows import GROUPS_PER_VERSION, ROWS_PER_START_GROUP, MadeUpPast
from cli import main
from reports.growth import Growth
from storage.facts import DECISION_FACTS
from storage.runs import RunPaths
from telemetry.errors import InputError


def measured(points: dict[int, dict[str, float]]) -> Growth:
    return Growth(axis="rows", figures=growing.FIGURES, points=points)


def test_growth_is_of_the_most_rows_over_the_fewest_and_memory_that_of_the_most(monkeypatch: pytest.MonkeyPatch):
    points = {n: {"select_ms": 10.0 + place, "peak_mb": 500.0 * (place + 1)} for place, n in enumerate(SIZES)}
    monkeypatch.setattr(rows, "measure_rows", lambda sizes, **how: measured({n: points[n] for n in sizes}))
    found = bench_rows()
    assert found.metrics["select_1e4_ms"] == 10 and found.metrics["select_1e6_ms"] == 11 and found.metrics["select_1e8_ms"] == 12
    assert found.metrics["select_growth"] == 1.2 and found.metrics["memory_gb"] == 1.5
    assert set(found.targets) == set(TARGETS) and not found.scaled_down and found.ok
    quick = bench_rows(sizes=SIZES[:2])
    assert set(quick.targets) == {"select_1e6_ms", "select_growth", "memory_gb"}
    assert set(quick.scaled_down) == {"select_growth", "memory_gb"}, "a million is no hundred million"
    with pytest.raises(InputError, match="nothing to measure in 0 rounds"):
        bench_rows(rounds=0)


def test_the_command_measures_real_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    monkeypatch.setattr("benchmarks.rows.QUICK_SIZES", (4_200, 200_000))
    monkeypatch.setattr(growing, "SQL_ROWS", 4_200)
    assert main.run(["bench", "rows", "--quick", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert 0 < found["select_growth"] < 50 and 0.05 < found["memory_gb"] < 2
    assert found["sql_open_4e3_s"] > 0 and "sql_open_2e5_s" not in found and found["open_2e5_s"] > 0


def test_a_size_that_memory_is_too_small_for_is_not_opened_for_sql(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growing, "SQL_ROWS", 0)
    monkeypatch.setattr(growing, "_run", lambda work, *given: {f"{work}_ms": 1.0})
    said: list[str] = []
    monkeypatch.setattr(growing, "reporter", lambda: type("Said", (), {"say": said.append, "stage": lambda *_: None})())
    assert measure_rows([10_000], rounds=1, seed=0).points == {10_000: {"make_ms": 1.0, "measure_ms": 1.0}}
    assert said == ["10,000 rows are not opened for SQL: all their facts would be in memory"]


def test_parts_of_a_past_follow_one_another_and_play_every_version_equally(tmp_path: Path):
    paths, past = RunPaths(tmp_path).create(), MadeUpPast(240, seed=0)
    parts = [past.part(empty_shards(paths, range(first, first + 240), 10)).decisions for first in (0, 240)]
    for part, first in zip(parts, (0, 240), strict=True):
        assert part.schema.equals(DECISION_FACTS) and part.num_rows == 240 * ROWS_PER_START_GROUP
        groups = part["start_group"].to_pylist()
        assert (groups[0], groups[-1]) == (first, first + 239) and groups == sorted(groups)
        versions = part["policy_version"].to_pylist()
        lags = {group // GROUPS_PER_VERSION - version for group, version in zip(groups, versions, strict=True)}
        assert lags <= {0, 1, 2, 3} and len(lags) > 1
    ids = [number for part in parts for number in part["decision_id"].to_pylist()]
    assert ids == list(range(1, len(ids) + 1))
    with pytest.raises(ValueError, match="250 start groups are more than the 240"):
        past.part(empty_shards(paths, range(480, 730), 10))
