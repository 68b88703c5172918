"""An index that lets go of what no step can reach chooses what one with every fact chooses, whatever the run went through."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from storage.index import Index, open_index
from storage.ledger import recorded_steps, write_ledger
from storage.ranges import Ranges
from storage.retention import RetentionSettings
from storage.retire import RunAge, retire
from storage.runs import RunPaths
from storage.selection import Reach, Selection, SelectionQuery
from storage.shards import publish_shard
from storage.snapshots import snapshot_files
from tests.damage import flip
from tests.storage.make_rows import make_shard_rows

LAG = 2
BLENDS: tuple[dict[str, float], ...] = (
    {"centres_gained": 1.0},
    {"centres_gained": 1.0, "final_sos_share": -3.5},
    {"survival": 1.0},
)


def everything(paths: RunPaths, scratch: Path, blend: dict[str, float]) -> Index:
    """The oracle: an index that reads every shard, ledger and tombstone, knows no snapshot, and keeps every fact."""
    scratch.mkdir()
    for folder in ("shards", "ledger", "retired"):
        (paths.root / folder).mkdir(exist_ok=True)
        (scratch / folder).symlink_to(paths.root / folder)
    index = open_index(RunPaths(scratch), blend=blend)
    return index


def same(one: Selection, other: Selection) -> None:
    assert one.rows.equals(other.rows)
    assert one.counts == other.counts
    assert numbers(one.seen) == numbers(other.seen)


def numbers(seen: str) -> dict[str, set[int]]:
    return {
        name: {number for first, after in ranges for number in range(first, after)} for name, ranges in json.loads(seen).items()
    }


@pytest.fixture(autouse=True, scope="module")
def _no_grace() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.retire.STALE_VERSIONS", 1)
        patch.setattr("storage.retire.GRACE_HOURS", 0.0)
        yield


class History(RuleBasedStateMachine):
    """A run with everything that may happen to one; each choice is made by three indexes.

    They are `kept`, that of the trainer's process, one that a new process would open, and the oracle. `trained` is the version
    that the trainer holds.
    """

    @initialize(blend=st.sampled_from(BLENDS), uses=st.integers(1, 2), forks=st.integers(2, 3))
    def begin(self, blend: dict[str, float], uses: int, forks: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="entente-history-"))
        self.paths = RunPaths(self.folder / "run").create()
        self.blend, self.uses, self.forks = blend, uses, forks
        self.dice = random.Random(11)
        self.next = {"p0": 0, "p1": 0}
        self.trained = 0
        self.kept = self.reopened()
        self.publish(2, 0)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def reopened(self) -> Index:
        index = open_index(self.paths, blend=self.blend, reach=Reach(policy_version=self.trained, max_policy_lag=LAG))
        return index

    @rule(count=st.integers(1, 4), behind=st.integers(0, 5))
    def publish(self, count: int, behind: int) -> None:
        """Shards of one or two start groups, some of which come very late; their numbers have gaps."""
        for producer in ("p0", "p1"):
            for _ in range(count):
                first = self.next[producer]
                groups = range(first, first + self.dice.choice([1, 1, 2]))
                versions = [max(0, self.trained - behind), max(0, self.trained - self.dice.choice([0, behind]))]
                decisions, plies = make_shard_rows(self.dice, groups, producer, self.forks)
                decisions = [
                    replace(
                        row, policy_version=versions[row.fork % 2], status="failed" if self.dice.random() < 0.03 else "complete"
                    )
                    for row in decisions
                ]
                publish_shard(self.paths, producer, first, decisions, plies, {})
                self.next[producer] = groups.stop + self.dice.choice([0, 0, 0, 1])

    @rule(steps=st.integers(1, 4))
    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.publish(1, 0)

    def step(self) -> None:
        """Choose, compare, and record, unless a kill came after this step's ledger: then it is repeated as recorded."""
        step = self.trained + 1
        if step not in recorded_steps(self.paths):
            self.kept.refresh()
            chosen = self.compare(LAG, step)
            assert write_ledger(self.paths, step, chosen.rows, {})
        self.trained = step

    @rule(lag=st.integers(0, 6))
    def ask(self, lag: int) -> None:
        """A choice that nothing records, also one that reaches further back than the trainer's."""
        self.kept.refresh()
        self.compare(lag, self.trained + 1)

    def compare(self, lag: int, step: int) -> Selection:
        query = SelectionQuery(
            step=step, policy_version=self.trained, max_policy_lag=lag, start_groups=2, seed=3,
            max_uses=self.uses,
        )  # fmt: skip
        scratch = self.folder / "oracle"
        oracle = everything(self.paths, scratch, self.blend)
        expected, could = oracle.select_batch(query), oracle.eligible(query)
        for index in (self.kept, self.reopened()):
            same(index.select_batch(query), expected)
            assert index.eligible(query) == could and index.totals() == oracle.totals()
            assert {shard.name for shard in index.live()} == {shard.name for shard in oracle.live()}
            assert {shard.name for shard in index.retired()} == {shard.name for shard in oracle.retired()}
            assert index.newest_step() == oracle.newest_step()
        shutil.rmtree(scratch)
        return expected

    @rule()
    def snapshot(self) -> None:
        self.kept.refresh()
        self.kept.snapshot_if_due(1)

    @rule()
    def kill(self) -> None:
        """A new process."""
        self.kept = self.reopened()

    @precondition(lambda self: self.trained > 1)
    @rule(back=st.integers(1, 3))
    def lose_checkpoints(self, back: int) -> None:
        """The newest checkpoints are damaged: the run goes on from an older one and repeats what the ledgers say."""
        self.trained = max(0, self.trained - back)
        self.kept = self.reopened()

    @rule()
    def retire(self) -> None:
        age = RunAge(policy_version=self.trained, oldest_checkpoint=max(0, self.trained - 3), max_policy_lag=LAG)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("storage.retire.STALE_VERSIONS", 1)
            patch.setattr("storage.retire.GRACE_HOURS", 0.0)
            retire(self.paths, self.kept, age, RetentionSettings(shards_gb=1e-9, replay_steps=2))

    @rule(which=st.integers(0, 99))
    def damage(self, which: int) -> None:
        """A shard that nothing recorded names loses a bit; who opened it before does not know, so the process is a new one."""
        named = shards_named(self.paths)
        files = sorted(
            file for file in self.paths.shards.glob("*/??????.arrow") if f"{file.parent.name}/{file.name}" not in named
        )
        if files:
            file = files[which % len(files)]
            flip(file)
            self.kept = self.reopened()


def shards_named(paths: RunPaths) -> set[str]:
    return {shard for (shard,) in open_index(paths).fetch("SELECT DISTINCT shard FROM batches")}


TestHistory: Any = History.TestCase
TestHistory.settings = settings(
    max_examples=3,
    stateful_step_count=12,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a failure smaller would take minutes
)


# -- single rules ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps: start group n is of version n, and step n + 1 was trained on it; all shards are in parts."""
    paths = RunPaths(tmp_path_factory.mktemp("played") / "run").create()
    rng, index = random.Random(4), Index(paths, reach=Reach(policy_version=0, max_policy_lag=LAG))
    for number in range(12):
        decisions, plies = make_shard_rows(rng, range(number, number + 1), policy_version=number, forks=4)
        publish_shard(paths, "p0", number, decisions, plies, {})
        index.refresh()
        chosen = index.select_batch(query(number)).rows
        assert chosen.num_rows and write_ledger(paths, number + 1, chosen, {})
        index.snapshot_if_due(2)
    index.refresh()
    index.select_batch(query(12))
    index.snapshot_if_due(1)
    return paths.root


@pytest.fixture
def long_run(played: Path, tmp_path: Path) -> RunPaths:
    """A copy of it; write times are kept."""
    return RunPaths(Path(shutil.copytree(played, tmp_path / "run")))


def query(version: int, **given: Any) -> SelectionQuery:
    asked = {"policy_version": version, "max_policy_lag": LAG, "start_groups": 1, "seed": 0} | given
    return SelectionQuery(step=version + 1, **asked)


def opened(paths: RunPaths, version: int = 12) -> Index:
    index = open_index(paths, reach=Reach(policy_version=version, max_policy_lag=LAG))
    return index


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names of the shards, the snapshots' rows and the ledgers that are read from here on."""
    names: dict[str, list[str]] = {"map_shard": [], "read_snapshot": [], "read_ledger_file": []}
    for function, calls in names.items():
        work: Callable[[Path], Any] = getattr(__import__("storage.intake", fromlist=[function]), function)
        monkeypatch.setattr(
            f"storage.intake.{function}", lambda path, work=work, calls=calls: calls.append(path.name) or work(path)
        )
    return names


def test_facts_that_no_step_can_reach_leave_the_tables_and_are_counted(long_run: RunPaths) -> None:
    index, whole = opened(long_run), Index(long_run)
    whole.refresh()
    held = [version for (version,) in index.fetch("SELECT DISTINCT policy_version FROM decisions")]
    assert sum(version < 12 - LAG - 1 for version in held) * 2 < len(held) < 8, "less than half of what is held is out of reach"
    for table in ("decisions", "advantage_groups", "plies", "used_groups", "batches"):
        assert index.fetch(f"SELECT count(*) FROM {table}") < whole.fetch(f"SELECT count(*) FROM {table}"), table
    assert index.totals() == whole.totals() and index.totals().decisions == 12 * 16
    same(index.select_batch(query(12)), whole.select_batch(query(12)))


def test_a_new_index_reads_neither_rows_nor_ledgers_of_settled_shards(long_run: RunPaths, read: dict[str, list[str]]) -> None:
    index = opened(long_run)
    assert read["map_shard"] == [] and len(snapshot_files(long_run.index)) > 3
    assert len(read["read_snapshot"]) <= 3 and len(read["read_ledger_file"]) <= 4, "those that can still matter"
    assert numbers(index.seen()) == {"p0": set(range(12))}
    assert index.fetch("SELECT count(*) FROM batches ANTI JOIN decisions USING (shard)") == [(0,)], "nor keeps what they say"


@pytest.mark.parametrize("fault", ["gone", "bit", "shard"])
def test_a_record_that_does_not_fit_the_run_is_not_believed(long_run: RunPaths, fault: str, read: dict[str, list[str]]) -> None:
    """Without a record everything is read once, and counted with the same result."""
    expected = opened(long_run).select_batch(query(12))
    *_, newest = sorted(long_run.index.glob("settled-*.json"))
    content = newest.read_text()
    for record in long_run.index.glob("settled-*.json"):
        record.unlink()
    if fault == "bit":
        newest.write_text(content.replace('"decisions": 1', '"decisions": 2'))
    elif fault == "shard":  # one of the settled shards is another file now
        newest.write_text(content)
        shard = long_run.shards / "p0" / "000001.arrow"
        os.utime(shard, ns=(1, 1))
    read["read_ledger_file"].clear()
    index = opened(long_run)
    assert len(read["read_ledger_file"]) == 12
    same(index.select_batch(query(12)), expected)


# -- ranges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_ranges_are_a_set_of_numbers(seed: int) -> None:
    rng, plain, ranges = random.Random(seed), set[int](), Ranges()
    for _ in range(30):
        first = rng.randrange(60)
        after = first + rng.randrange(5)
        plain |= set(range(first, after))
        ranges.add(first, after)
        assert [number for number in range(70) if number in ranges] == sorted(plain)
        lists = ranges.as_lists()
        assert all(one[1] < other[0] for one, other in pairwise(lists)), "no two touch"
        assert Ranges(lists).as_lists() == lists
