"""Several runs are asked at once: a view has the rows of all, with the run in front; a ready question stays within a run."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from storage.asking import QUERIES, ask, connect_run, connect_runs, ready_query, ready_query_of_runs
from storage.run_views import VIEWS, AskedRun
from storage.runs import RunPaths
from storage.shards import publish_shard
from telemetry.errors import InputError
from tests.storage.make_rows import make_shard_rows


@pytest.fixture
def runs(tmp_path: Path) -> list[AskedRun]:
    """Two runs whose decisions have the same ids and other contents; one has a name that SQL would read otherwise."""
    found = []
    for number, name in enumerate(("main", "b-1.x")):
        paths = RunPaths(tmp_path / name).create()
        decisions, plies = make_shard_rows(random.Random(number), range(number + 1), "local")
        publish_shard(paths, "local", 0, decisions, plies, {}, next_start_group=number + 1)
        paths.metrics.write_text(json.dumps({"step": 1, "train/return_mean": float(number)}) + "\n")
        found.append(AskedRun(folder=paths.root, token_text=lambda token, name=name: f"{name}:{token}"))
    return found


def rows(answer: Any) -> list[tuple]:
    return sorted(tuple(map(str, row.values())) for row in answer.to_pylist())


def test_a_view_has_the_rows_of_each_run_after_its_name(runs: list[AskedRun]):
    alone: dict[str, list[tuple]] = {view: [] for view in VIEWS}
    for run in runs:
        with connect_run(run) as connection:
            for view, found in alone.items():
                found += [(run.folder.name, *row) for row in rows(ask(connection, f'from "{view}"'))]
    with connect_runs(runs) as connection:
        for view, expected in alone.items():
            found = ask(connection, f'from "{view}"')
            assert found.column_names[0] == "run" and rows(found) == sorted(expected), view
    assert all(alone[view] for view in ("decisions", "groups", "plies", "orders", "tokens", "snapshots", "standings", "metrics"))


def test_a_ready_question_is_asked_of_each_run_on_its_own(runs: list[AskedRun]):
    """Ids of decisions are the same in both runs, so a join over all rows would count them twice."""
    alone: dict[str, list[tuple]] = {name: [] for name in QUERIES}
    for run in runs:
        with connect_run(run) as connection:
            for name, found in alone.items():
                found += [(run.folder.name, *row) for row in rows(ask(connection, ready_query(name)))]
    with connect_runs(runs) as connection:
        for name, expected in alone.items():
            assert rows(ask(connection, ready_query_of_runs(connection, runs, name))) == sorted(expected), name
    assert alone["duplicate_completions"] and alone["order_entropy"]


def test_each_run_has_its_own_blend(runs: list[AskedRun]):
    weighed = [runs[0], AskedRun(folder=runs[1].folder, blend={"centres_gained": 2.0}, discount=0.0)]
    question = 'select run, bool_and(abs("return" - 2 * centres_gained) < 1e-6) as twice from decisions group by run order by run'
    with connect_runs(weighed) as connection:
        assert [row["twice"] for row in ask(connection, question).to_pylist()] == [True, False]


def test_nothing_can_be_changed_or_reached_and_wrong_names_are_helped(runs: list[AskedRun], tmp_path: Path):
    with connect_runs(runs) as connection:
        for question in ("drop view decisions", "from read_csv('/etc/passwd')", "set memory_limit = '1GB'"):
            with pytest.raises(InputError):
                ask(connection, question)
        with pytest.raises(InputError, match='; did you mean "power"\\?; the views are decisions, '):
            ask(connection, "select powr from decisions")
        with pytest.raises(InputError, match="there is no ready question 'x'"):
            ready_query_of_runs(connection, runs, "x")
    with pytest.raises(InputError, match="is not a run"):
        connect_runs([runs[0], AskedRun(folder=tmp_path / "none")])
