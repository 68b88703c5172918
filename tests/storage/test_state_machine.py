"""A run as hypothesis drives it: written, crashed, published, selected, trained, retired, resumed; held against a dictionary.

The dictionary knows what was published and what each step took, and works out by loops what may be chosen and what may go.
"""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from entente.records.rows import Decision
from storage.index import Index
from storage.ledger import read_ledger, write_ledger
from storage.retention import RetentionSettings, RunAge, retire
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import publish_shard
from tests.storage.make_rows import make_shard_rows

LAG, STALE, REPLAYED = 2, 1, 2


@pytest.fixture(autouse=True, scope="module")
def _no_grace() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.retention.STALE_VERSIONS", STALE)
        patch.setattr("storage.retention.REPLAY_STEPS", REPLAYED)
        yield


Group = tuple[str, int, str, str]


class Run(RuleBasedStateMachine):
    """A run and its model; `trained` is the step whose checkpoint stands, `recorded` the newest with a ledger."""

    @initialize(uses=st.integers(1, 2))
    def begin(self, uses: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="entente-machine-"))
        self.paths = RunPaths(self.folder / "run").create()
        self.storage = StorageSettings(max_policy_lag=LAG, max_uses=uses)
        self.retention = RetentionSettings(shards_gb=1e-9)
        self.rng = random.Random(7)
        self.rows: dict[str, list[Decision]] = {}
        self.ledgers: dict[int, list[int]] = {}
        self.trained = 0
        self.gone: set[str] = set()
        self.index = Index(self.paths, self.storage, oldest=-LAG)
        self.write(2, 0, crash=False)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    @rule(count=st.integers(1, 4), behind=st.integers(0, 2), crash=st.booleans())
    def write(self, count: int, behind: int, crash: bool) -> None:
        """Publish the next start groups of both producers, drawn some versions ago; a crash leaves what a writer may leave."""
        for producer in ("p0", "p1") * count:
            number = sum(name.startswith(producer) for name in self.rows)
            decisions, phases = make_shard_rows(
                self.rng, range(number, number + 1), producer, forks=2, policy_version=max(0, self.trained - behind)
            )
            if crash:
                folder = self.paths.shards / producer
                folder.mkdir(exist_ok=True)
                (folder / f".{number:06d}.arrow.1-00000000.tmp").write_bytes(b"ARROW1")
                (folder / f"{number:06d}.00000000.phases.arrow").write_bytes(b"half")
            publish_shard(self.paths, producer, number, decisions, phases, {})
            self.rows[f"{producer}/{number:06d}.arrow"] = decisions

    @rule(which=st.integers(0, 99))
    def write_again(self, which: int) -> None:
        """A retry of a task that had published: it loses, unless its shard was given up meanwhile, which changes nothing."""
        name = sorted(self.rows)[which % len(self.rows)]
        producer, number = name[:2], int(name[3:9])
        others, phases = make_shard_rows(self.rng, range(number, number + 1), producer, forks=3)
        found = publish_shard(self.paths, producer, number, others, phases, {})
        assert found.decisions == len(others if name in self.gone else self.rows[name])
        if name in self.gone:
            self.index.refresh()
            found.path.unlink()
            found.phases_path.unlink()

    @rule(steps=st.integers(1, 3), killed=st.booleans())
    def train(self, steps: int, killed: bool) -> None:
        """Some steps, and one that a kill may cut."""
        for _ in range(steps):
            self.step(killed=False)
        self.step(killed)

    def step(self, killed: bool) -> None:
        """Choose, record, and unless a kill comes between, a checkpoint."""
        step = self.trained + 1
        if step in self.ledgers:  # a kill came after its ledger: it is repeated as recorded
            recorded = read_ledger(self.paths, step)
            assert recorded is not None and recorded["decision_id"].to_pylist() == self.ledgers[step]
            assert self.index.gather(recorded).decision_ids.tolist() == self.ledgers[step]
        else:
            self.index.refresh()
            chosen, _ = self.index.select_batch(step, policy_version=self.trained, start_groups=2)
            ids = chosen["decision_id"].to_pylist()
            assert self.index.gather(chosen).decision_ids.tolist() == ids
            eligible = self.eligible()
            taken = {group for group, members in self.groups().items() if members & set(ids)}
            assert taken <= eligible and set(ids) == {row for group in taken for row in self.groups()[group]}
            starts = {group[:2] for group in taken}
            assert len(starts) == min(2, len({group[:2] for group in eligible}))
            assert taken == {group for group in eligible if group[:2] in starts}, "start groups are drawn whole"
            assert write_ledger(self.paths, step, chosen, {})
            assert not write_ledger(self.paths, step, chosen, {}), "the fence"
            self.ledgers[step] = ids
        if not killed:
            self.trained = step

    @rule()
    def resume(self) -> None:
        """A new process: it knows what the files say and nothing else."""
        self.index = Index(self.paths, self.storage, oldest=self.trained - LAG)

    @rule()
    def retire(self) -> None:
        """All that may go goes; the oldest checkpoint is the newest one here."""
        age = RunAge(policy_version=self.trained, oldest_checkpoint=self.trained, max_policy_lag=LAG)
        retire(self.paths, self.index.newest_versions, age, self.retention)
        newest = max(self.ledgers, default=0)
        pinned = {row for step, ids in self.ledgers.items() if step > min(newest - REPLAYED, self.trained) for row in ids}
        self.gone |= {
            name
            for name, some in self.rows.items()
            if all(row.policy_version < self.trained - LAG - STALE for row in some)
            and not pinned & {row.decision_id for row in some}
        }
        there = {f"{path.parent.name}/{path.name}" for path in self.paths.shards.glob("*/??????.arrow")}
        assert there == set(self.rows) - self.gone

    @invariant()
    def the_index_knows_what_was_published(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.refresh()
        could = self.index.eligible(self.trained + 1, policy_version=self.trained)
        assert could.advantage_groups == len(self.eligible())
        found = [row for (row,) in self.index.connection.sql("SELECT decision_id FROM decisions").fetchall()]
        within = [some for some in self.rows.values() if max(row.policy_version for row in some) >= self.trained - LAG]
        assert sorted(found) == sorted(row.decision_id for some in within for row in some)
        assert self.index.refused == []
        uses = Counter(row for ids in self.ledgers.values() for row in ids)
        assert max(uses.values(), default=0) <= self.storage.max_uses

    def groups(self) -> dict[Group, set[int]]:
        found: dict[Group, set[int]] = {}
        for name, some in self.rows.items():
            for row in some:
                found.setdefault((name, row.start_group, row.power, row.phase), set()).add(row.decision_id)
        return found

    def eligible(self) -> set[Group]:
        uses = Counter(row for ids in self.ledgers.values() for row in ids)
        found = set()
        for group, members in self.groups().items():
            some = self.rows[group[0]]
            version = some[0].policy_version
            returns = {row.decision_id: self.value(row, some) for row in some if row.decision_id in members}
            if (
                0 <= self.trained - version <= LAG
                and max(uses[row] for row in members) < self.storage.max_uses
                and max(returns.values()) - min(returns.values()) > 1e-6
            ):
                found.add(group)
        return found

    @staticmethod
    def value(row: Decision, some: list[Decision]) -> float:
        same = (
            other for other in some if (other.fork, other.power) == (row.fork, row.power) and other.phase_index >= row.phase_index
        )
        return sum(other.centres_gained for other in same)


QUICK = settings(
    max_examples=4,
    stateful_step_count=12,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # making a failure smaller would take minutes
)
TestRun: Any = Run.TestCase
TestRun.settings = QUICK


class LongRun(Run):
    """The same, more often and for longer."""


TestLongRun: Any = pytest.mark.slow(LongRun.TestCase)
TestLongRun.settings = settings(QUICK, max_examples=200, stateful_step_count=30)
