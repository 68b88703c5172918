"""What a run gives up to stay within its disk goes by the rule alone, tombstone first; facts stay."""

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.clean import clean
from storage.asking import connect
from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.retention import RetentionSettings
from storage.retire import RunAge, retirable, retire
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.shards import publish_shard
from storage.tombstones import remove_retired_files, shard_bytes
from tests.storage.make_rows import make_shard_rows

TIGHT = RetentionSettings(shards_gb=1e-9, replay_steps=3)
"""No room at all: whatever may go, goes."""


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.retire.STALE_VERSIONS", 2)
    monkeypatch.setattr("storage.retire.GRACE_HOURS", 0.0)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps: start group n is of version n, and step n + 1 was trained on it, but for every third, which nobody used."""
    paths = RunPaths(tmp_path_factory.mktemp("trained") / "run").create()
    rng, index = random.Random(4), Index(paths)
    for number in range(10):
        decisions, plies = make_shard_rows(rng, range(number, number + 1), policy_version=number, forks=4)
        publish_shard(paths, "p0", number, decisions, plies, {})
        index.refresh()
        query = SelectionQuery(step=number + 1, policy_version=number, max_policy_lag=0, start_groups=1, seed=0)
        chosen = index.select_batch(query).rows
        assert chosen.num_rows
        assert write_ledger(paths, number + 1, chosen if number % 3 else chosen.slice(0, 0), {})
    return paths.root


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> RunPaths:
    """A copy to change."""
    return RunPaths(Path(shutil.copytree(trained_run, tmp_path / "run")))


def age(**given: int) -> RunAge:
    return RunAge(**({"policy_version": 10, "oldest_checkpoint": 8, "max_policy_lag": 2} | given))


def going(paths: RunPaths, settings: RetentionSettings = TIGHT, index: Index | None = None, **given: int) -> list[int]:
    return [shard.number for shard in retirable(paths, index or open_index(paths), age(**given), settings)]


def test_only_rows_that_nothing_can_need_again_may_go(run: RunPaths) -> None:
    # Version 10, lag 2 and 2 of grace: rows of versions up to 5. The last 3 steps are 8, 9, 10, on start groups 7, 8, 9.
    index = open_index(run)
    assert going(run, index=index) == [0, 1, 2, 3, 4, 5]
    assert going(run, index=index, max_policy_lag=5) == [0, 1, 2]
    assert going(run, index=index, oldest_checkpoint=2) == [0, 1, 3], "steps from 3 on may be repeated: all they used stays"
    assert going(run, TIGHT.model_copy(update={"replay_steps": 6}), index) == [0, 1, 2, 3]
    assert going(run, TIGHT.model_copy(update={"shards_gb": 0}), index) == [], "no budget, nothing goes"


def test_a_ledger_of_a_step_that_may_be_replayed_holds_its_rows(run: RunPaths) -> None:
    index = open_index(run)
    chosen = index.select_batch(
        SelectionQuery(step=1, policy_version=2, max_policy_lag=0, start_groups=1, seed=0, max_uses=2)
    ).rows
    assert set(chosen["start_group"].to_pylist()) == {2}
    assert write_ledger(run, 99, chosen, {})
    assert going(run) == [0, 1, 3, 4, 5]


def test_the_oldest_go_first_and_no_more_than_must(run: RunPaths) -> None:
    a_shard = shard_bytes(run) / 10
    settings = TIGHT.model_copy(update={"shards_gb": 8.5 * a_shard / 1e9})
    assert going(run, settings) == [0, 1]
    freed = retire(run, Index(run), age(), settings)
    assert freed > 1.5 * a_shard and shard_bytes(run) <= 8.5 * a_shard
    assert going(run, settings) == []


QUESTIONS = [
    "from decisions order by all",
    "select * exclude used from groups order by all",
    "from batches order by all",
    "from plies order by all",
    "from lag",
]


def test_what_went_still_answers_questions(run: RunPaths) -> None:
    tokens, orders = "from tokens order by decision_id, place", "from orders order by decision_id"
    with connect(run.root) as before:
        expected = [before.sql(question).fetchall() for question in QUESTIONS]
        all_tokens, all_orders = before.sql(tokens).fetchall(), before.sql(orders).fetchall()
    live = open_index(run)
    size = shard_bytes(run)
    freed = retire(run, Index(run), age(), TIGHT)
    assert freed == size - shard_bytes(run) > 0
    assert sorted(path.name[:6] for path in (run.shards / "p0").glob("*[0-9].arrow")) == [f"{n:06d}" for n in range(6, 10)]
    with connect(run.root) as after:
        assert [after.sql(question).fetchall() for question in QUESTIONS] == expected
        some_tokens, some_orders = after.sql(tokens).fetchall(), after.sql(orders).fetchall()
        assert after.sql("from refused").fetchall() == []
    kept = after_version(run, 6)
    assert some_tokens == [row for row in all_tokens if row[0] in kept]
    assert some_orders == [row for row in all_orders if row[0] in kept]
    assert live.refresh() == 0 and live.refused == [], "who had the rows already keeps them"
    assert {shard.number for shard in live.retired()} == set(range(6))
    again = open_index(run)
    assert again.seen() == live.seen() == '{"p0":[[0,10]]}'
    assert again.snapshot_if_due(1) is not None
    assert known(open_index(run)) == known(again) == known(live), "a snapshot and a tombstone do not tell of the same row"


def after_version(paths: RunPaths, version: int) -> set[int]:
    found = open_index(paths).connection.execute("select decision_id from decisions where policy_version >= ?", [version])
    return {row for (row,) in found.fetchall()}


def known(index: Index) -> list[Any]:
    return [index.connection.sql(f"from {name} order by all").fetchall() for name in ("decisions", "plies", "advantage_groups")]


def test_nothing_is_removed_before_its_grace_nor_anything_else_under_its_name(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.retire.GRACE_HOURS", 1.0)
    assert retire(run, Index(run), age(), TIGHT) == 0
    assert len(list((run.shards / "p0").iterdir())) == 20
    assert open_index(run).gather(open_index(run).fresh_rows(policy_version=0, limit=9)).input_ids.size, "it is there until then"
    assert going(run) == [], "what was given up is not counted twice"
    stranger = run.shards / "p0" / "000002.arrow"
    content = stranger.read_bytes()
    stranger.unlink()
    stranger.write_bytes(content + b"!")
    freed = remove_retired_files(run, 0)
    assert freed and sorted(path.name[:6] for path in (run.shards / "p0").glob("*.plies.arrow")) == [
        "000002",
        *(f"{number:06d}" for number in range(6, 10)),
    ]
    assert stranger.exists() and remove_retired_files(run, 0) == 0


RETIRER = """
import os, signal, sys
from pathlib import Path
from storage.index import open_index, Index
from storage.retention import RetentionSettings
import storage.retire
from storage.retire import RunAge, retire
from storage.runs import RunPaths

storage.retire.STALE_VERSIONS, storage.retire.GRACE_HOURS = 2, 0.0
calls_left = int(sys.argv[2])

def dying(call):
    def wrapped(*arguments, **named):
        global calls_left
        if calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        calls_left -= 1
        return call(*arguments, **named)
    return wrapped

os.fsync, os.link, os.unlink = dying(os.fsync), dying(os.link), dying(os.unlink)
settings = RetentionSettings(shards_gb=1e-9, replay_steps=3)
paths = RunPaths(Path(sys.argv[1]))
retire(paths, Index(paths), RunAge(policy_version=10, oldest_checkpoint=8, max_policy_lag=2), settings)
"""


@pytest.mark.system
@pytest.mark.parametrize("calls", [0, 3])
def test_killed_anywhere_it_loses_nothing_and_the_next_call_goes_on(run: RunPaths, calls: int) -> None:
    expected = known(open_index(run))
    command = [sys.executable, "-c", RETIRER, str(run.root), str(calls)]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, env={"PYTHONPATH": "."}
    )
    assert ended.returncode == -9, ended.stderr
    assert known(index := open_index(run)) == expected and index.refused == []
    retire(run, Index(run), age(), TIGHT)
    assert len(list((run.shards / "p0").glob("*[0-9].arrow"))) == 4
    assert known(open_index(run)) == expected


def test_clean_says_which_shards_go_and_removes_those_after_their_grace(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.retire.GRACE_HOURS", 2.0)
    run.settings.write_text("{}")
    for step in (9, 10):
        run.checkpoint(step).mkdir()
        (run.checkpoint(step) / "manifest.json").write_text("{}")

    def said(*, dry_run: bool = False) -> str:
        clean(run=[run.root.name], runs_root=run.root.parent, dry_run=dry_run, settings=TIGHT)
        return capsys.readouterr().out

    before = sorted(run.root.rglob("*"))
    told = said(dry_run=True)
    assert "shard too old to train on" in told and "12 " in told and "would be given up: clean again in 2 h" in told
    assert [path for path in sorted(run.root.rglob("*")) if ".lock" not in path.name] == before
    assert "were given up" in said() and len(list((run.shards / "p0").iterdir())) == 20
    monkeypatch.setattr("storage.retire.GRACE_HOURS", 0.0)
    told = said(dry_run=True)
    assert "shard retired before" in told and "would be freed" in told
    assert "were freed" in said() and len(list((run.shards / "p0").iterdir())) == 8
    assert "nothing is old enough to go" in said()
