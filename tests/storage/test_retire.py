"""What a run removes to stay within its disk goes by the rule alone, oldest first and whole."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from entente.cli.clean import clean
from storage.index import Index, open_index
from storage.ledger import write_ledger
from storage.retention import ASIDE_HOURS, RetentionSettings, RunAge, newest_versions, removable_shards, retire, size_of
from storage.run_sql import connect
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import publish_shard
from tests.damage import flip
from tests.storage.make_rows import make_shard_rows

TIGHT = RetentionSettings(shards_gb=1e-9)
"""No room at all: whatever may go, goes."""


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.retention.STALE_VERSIONS", 2)
    monkeypatch.setattr("storage.retention.REPLAY_STEPS", 3)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps: start group n is of version n, and step n + 1 was trained on it, but for every third, which nobody used."""
    paths = RunPaths(tmp_path_factory.mktemp("trained") / "run").create()
    rng, index = random.Random(4), Index(paths, StorageSettings(max_policy_lag=0))
    for number in range(10):
        decisions, phases = make_shard_rows(rng, range(number, number + 1), policy_version=number, forks=4)
        publish_shard(paths, "p0", number, decisions, phases, {})
        index.refresh()
        chosen, _ = index.select_batch(number + 1, policy_version=number, start_groups=1)
        assert chosen.num_rows
        assert write_ledger(paths, number + 1, chosen if number % 3 else chosen.slice(0, 0), {})
    return paths.root


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> RunPaths:
    """A copy to change."""
    return RunPaths(Path(shutil.copytree(trained_run, tmp_path / "run")))


def age(**given: int) -> RunAge:
    return RunAge(**({"policy_version": 10, "oldest_checkpoint": 8, "max_policy_lag": 2} | given))


def going(paths: RunPaths, settings: RetentionSettings = TIGHT, **given: int) -> list[int]:
    """Numbers of the shards that would go, in their order; each with its phases."""
    files = [file.path.name for file in removable_shards(paths, newest_versions(paths), age(**given), settings)]
    assert [name[:6] for name in files[::2]] == [name[:6] for name in files[1::2]]
    assert all(".phases." not in name for name in files[::2]) and all(".phases." in name for name in files[1::2])
    return [int(name[:6]) for name in files[::2]]


def remove(paths: RunPaths, settings: RetentionSettings = TIGHT) -> int:
    return retire(paths, newest_versions(paths), age(), settings)


def test_only_rows_that_nothing_can_need_again_may_go(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    # Version 10, lag 2 and 2 of grace: rows of versions up to 5. The last 3 steps are 8, 9, 10, on start groups 7, 8, 9.
    assert going(run) == [0, 1, 2, 3, 4, 5]
    assert going(run, max_policy_lag=5) == [0, 1, 2]
    assert going(run, oldest_checkpoint=2) == [0, 1, 3], "steps from 3 on may be repeated: all they used stays"
    assert going(run, TIGHT.model_copy(update={"shards_gb": 0})) == [], "no budget, nothing goes"
    monkeypatch.setattr("storage.retention.REPLAY_STEPS", 6)
    assert going(run) == [0, 1, 2, 3]


def test_a_ledger_of_a_step_that_may_be_replayed_holds_its_rows(run: RunPaths) -> None:
    index = open_index(run, StorageSettings(max_policy_lag=0, max_uses=2))
    chosen, _ = index.select_batch(1, policy_version=2, start_groups=1)
    assert set(chosen["start_group"].to_pylist()) == {2}
    assert write_ledger(run, 99, chosen, {})
    assert going(run) == [0, 1, 3, 4, 5]


def test_files_of_the_user_and_behind_links_stay(run: RunPaths, trained_run: Path) -> None:
    notes, link = run.shards / "p0" / "notes.md", run.shards / "other"
    notes.write_text("mine")
    link.symlink_to(trained_run / "shards" / "p0")
    lonely = run.shards / "p0" / f"000077.{0:08x}.phases.arrow"
    lonely.write_bytes(b"")
    for file in (notes, lonely):
        os.utime(file, (0, 0))
    there = sorted(link.iterdir())
    remove(run)
    assert notes.exists() and sorted(link.iterdir()) == there and not lonely.exists()


def test_the_oldest_go_first_and_no_more_than_must(run: RunPaths) -> None:
    a_shard = size_of(run.shards) / 10
    settings = TIGHT.model_copy(update={"shards_gb": 8.5 * a_shard / 1e9})
    assert going(run, settings) == [0, 1]
    freed = remove(run, settings)
    assert freed > 1.5 * a_shard and size_of(run.shards) <= 8.5 * a_shard
    assert going(run, settings) == []


def test_what_went_is_gone_whole_and_the_rest_answers_questions(run: RunPaths) -> None:
    size, live = size_of(run.shards), open_index(run)
    assert remove(run) == size - size_of(run.shards) > 0
    assert sorted(path.name[:6] for path in (run.shards / "p0").iterdir()) == [f"{n:06d}" for n in range(6, 10) for _ in "dp"]
    assert live.refresh() == 0 and live.refused == [], "who had the facts already keeps them"
    with connect(run.root) as after:
        assert after.sql("select distinct start_group from decisions order by all").fetchall() == [(n,) for n in range(6, 10)]
        assert after.sql("select count(distinct step) from batches").fetchall() == [(6,)], "ledgers stay"
        assert after.sql("from rejected_files").fetchall() == []


def test_a_removal_that_was_killed_between_shard_and_phases_goes_on(run: RunPaths) -> None:
    shard, phases = sorted((run.shards / "p0").glob("000001.*"), key=lambda path: ".phases." in path.name)
    shard.unlink()
    assert open_index(run).refused == []
    assert phases not in [file.path for file in removable_shards(run, {}, age(), TIGHT)], "its shard may be on its way"
    os.utime(phases, (old := time.time() - ASIDE_HOURS * 3600 - 60, old))
    assert remove(run) and not phases.exists()
    assert len(list((run.shards / "p0").iterdir())) == 8


def test_a_damaged_shard_stays(run: RunPaths) -> None:
    flip(run.shards / "p0" / "000002.arrow")
    index = open_index(run)
    assert [name for name, _ in index.refused] == ["p0/000002.arrow"]
    retire(run, index.newest_versions, age(), TIGHT)
    assert {path.name[:6] for path in (run.shards / "p0").iterdir()} == {"000002", "000006", "000007", "000008", "000009"}


def test_clean_says_which_shards_go_and_removes_them(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    run.settings.write_text("{}")
    for step in (9, 10):
        run.checkpoint(step).mkdir()
        (run.checkpoint(step) / "manifest.json").write_text("{}")

    def said(*, dry_run: bool = False) -> str:
        clean(run=[run.root.name], runs_root=run.root.parent, dry_run=dry_run, settings=TIGHT)
        return capsys.readouterr().out

    before = sorted(run.root.rglob("*"))
    message = said(dry_run=True)
    assert "shard too old to train on" in message and "12 " in message and "would be freed" in message
    assert [path for path in sorted(run.root.rglob("*")) if ".lock" not in path.name] == before
    assert "were freed" in said() and len(list((run.shards / "p0").iterdir())) == 8
    assert "nothing is old enough to go" in said()
