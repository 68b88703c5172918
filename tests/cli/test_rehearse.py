"""`entente runs rehearse` shows past steps as a table and as data, and says what it cannot use in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli import main
from pipeline.run_settings import RunSettings
from storage.index import Index
from storage.ledger import write_ledger
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from tests.storage import make_rows
from tests.storage.test_selection import one_power_runs

FIRST = "FROM candidates SELECT shard, start_group ORDER BY start_group"


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command over a run whose two steps took start groups 0 and 1, then 2 and 3, of eight; its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    paths = RunPaths(Path("runs", "a")).create()
    paths.settings.write_text(RunSettings(run="a").model_dump_json())
    one_power_runs(paths, make_rows, {number: ("FRANCE", 0) for number in range(8)})
    for step in (1, 2):
        index = Index(paths)
        index.refresh()
        asked: dict[str, Any] = {"policy_version": 0, "max_policy_lag": 2, "start_groups": 2, "seed": 0}
        found = index.select_batch(SelectionQuery(step=step, lineage="main", selection=FIRST, **asked))
        assert write_ledger(
            paths, "main", step, found.rows, {"selection": found.query.to_json(), "seen": found.seen, "shortage": ""}
        )
    return lambda *words, run="a": main.run(["runs", "rehearse", "--run", run, *words])


def test_each_step_is_shown_with_what_it_took_and_what_the_query_takes(
    rehearse: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    Path("mine.sql").write_text(f"{FIRST} DESC")
    before = {file: file.stat().st_mtime_ns for file in Path("runs").rglob("*")}
    assert rehearse("--selection", "mine.sql", "--json") == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in table[1:]] == [["1", "8", "2", "2", "0"], ["2", "6", "2", "2", "0"]]
    facts = json.loads(last)["steps"]
    assert [(step["candidates"], step["both"], step["by_query"]["start_groups"]) for step in facts] == [(8, 0, 2), (6, 0, 2)]
    assert rehearse("--selection", FIRST, "--steps", "1", "--json") == 0
    (step,) = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"]
    assert (step["step"], step["both"]) == (2, 2) and step["in_fact"] == step["by_query"]
    assert {file: file.stat().st_mtime_ns for file in Path("runs").rglob("*")} == before


def test_what_it_cannot_use_is_one_sentence(rehearse: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    (Path("runs", "bare") / "shards").mkdir(parents=True)
    for selection, run, sentence in (
        ("gone.sql", "a", "query 'gone.sql' cannot be read"),
        ("DROP TABLE candidates", "a", "one SELECT"),
        (FIRST, "bare", "run 'bare' has no step yet"),
        (FIRST, "nowhere", "nowhere"),
    ):
        assert rehearse("--selection", selection, run=run) == 2
        assert sentence in capsys.readouterr().err
    for words, sentence in (
        ([], "give one query"),
        (["--selection", FIRST, "--sampling", "uniform"], "give one query"),
        (["--sampling", "learnabel"], "there is no sampling 'learnabel'"),
        (["--sampling", "FROM positions SELECT year"], "return snapshot_id and weight alone"),
        (["--sampling", "uniform"], "the state cache of run 'a' is gone"),
    ):
        assert rehearse(*words) == 2
        assert sentence in capsys.readouterr().err
