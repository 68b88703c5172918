"""The league: who its members are, how often they play, and that a start group always meets the same opponents."""

import asyncio
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from entente.players.past_versions import PastVersions
from entente.records.policy_version import BASE, PolicyVersion
from entente.rollouts.groups import GroupRange
from entente.rollouts.league import League, league_members, tally_fork, tally_shard, weigh
from entente.rollouts.resources import RolloutResources
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import InputError
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.adapters import ADAPTER_FILES, publish_adapter
from storage.retention import RetentionSettings, RunAge, removable_shards
from storage.run_sql import connect
from storage.runs import RunPaths
from storage.shards import publish_shard
from tasks.train_policy import roll_out_groups
from tests.storage.make_rows import make_decision, make_phase

SETTINGS = RolloutSettings(start_groups=4, forks_per_group=2, horizon_years=1, opponents="hold,league*2", opponents_by="seat")
CENTRES = {"AUSTRIA": 3, "ENGLAND": 4, "FRANCE": 5, "GERMANY": 6, "ITALY": 4, "RUSSIA": 4, "TURKEY": 4}


def published(paths: RunPaths, *versions: int) -> RunPaths:
    """The run's folder with these versions; the engines of these tests do not read them."""
    for version in versions:
        source = paths.root / "made"
        source.mkdir(exist_ok=True)
        for name in ADAPTER_FILES:
            (source / name).write_text(f"{name} {version}")
        publish_adapter(paths, version, source)
    return paths


@pytest.fixture(autouse=True)
def every_second_version_joins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("entente.rollouts.league.LEAGUE_EVERY", 2)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return published(RunPaths(tmp_path / "run").create(), *range(1, 10))


@pytest.mark.parametrize(
    ("served", "members"), [(0, [0]), (1, [0]), (2, [0, 2]), (5, [0, 2, 4]), (9, [0, 4, 6, 8])], ids=lambda each: str(each)
)
def test_members_are_version_0_and_the_newest_that_the_number_divides(served: int, members: list[int]):
    assert league_members(range(1, 10), 2, served) == members


def test_the_less_the_policy_wins_the_more_a_member_plays():
    """Win shares 8/10, 1/2 and 2/10 by hand: weights 0.04, 0.25 and 0.64, divided by 0.93."""
    found = weigh([0, 2, 4], {0: (7.0, 8), 4: (1.0, 8), 6: (3.0, 8)})
    assert [(member.version, member.games, member.win_share) for member in found] == [(0, 8, 0.8), (2, 0, 0.5), (4, 8, 0.2)]
    assert [member.weight for member in found] == pytest.approx([0.04 / 0.93, 0.25 / 0.93, 0.64 / 0.93], abs=1e-6)


def test_a_fork_is_won_with_more_centres_than_the_mean_of_the_member_s_seats():
    seats = "AUSTRIA=policy:2,ENGLAND=policy:4,GERMANY=policy:4,ITALY=hold,RUSSIA=policy:6,TURKEY=policy:6"
    assert tally_fork("FRANCE", seats, CENTRES) == {2: (1.0, 1), 4: (0.5, 1), 6: (1.0, 1)}
    assert tally_fork("AUSTRIA", "policy:2", CENTRES) == {2: (0.0, 1)}
    assert tally_fork("FRANCE", "territorial", CENTRES) == {}


def test_a_fork_that_failed_before_its_first_row_is_neither_won_nor_lost(tmp_path: Path):
    """Fork 1 began with a retreat of others, and failed at the policy's first decision; fork 2 failed after one."""
    position = json.dumps({"powers": [{"name": power, "centers": ["VIE"] * count} for power, count in CENTRES.items()]})
    rows = [make_decision(Random(0), "local", fork=0, opponents="policy:2")]
    rows += [make_decision(Random(0), "local", fork=2, opponents="policy:2", status="failed")]
    phases = [make_phase(fork=fork, position=position) for fork in range(3)]
    shard = publish_shard(RunPaths(tmp_path).create(), "local", 0, rows, phases, {}, failed_without_rows=["no answer"])
    assert tally_shard(shard.path) == {2: (1.0, 1)}


def resources(run: RunPaths, host: Any, engine: Any, tokens: Any, positions: Any) -> RolloutResources:
    return RolloutResources(
        paths=run, model=run.root, seed=5, rollouts=SETTINGS,
        cache=StateCache(path=run.root, settings=CacheSettings(), train=tuple(positions), held_out=()),
        host=host, engine=engine, tokens=tokens, provenance={},
    )  # fmt: skip


def opponents(run: RunPaths) -> dict[int, str]:
    with connect(run.root) as asked:
        return dict(asked.sql("select distinct start_group, opponents from decisions").fetchall())


def serve(made: RolloutResources, run: RunPaths, version: int) -> None:
    policy = PolicyVersion(version=version, adapter=run.adapter(version), adapter_hash=f"{version}")
    asyncio.run(made.host.run(made.past.publish(policy)))


def test_a_killed_and_resumed_run_meets_the_same_players(run: RunPaths, tmp_path: Path, host, uniform_engine, tokens, positions):
    """Killed after half of step 4. Meanwhile version 5 was published; another process plays the other half."""
    whole = RunPaths(tmp_path / "whole")
    shutil.copytree(run.root, whole.root)
    first, other = (
        resources(run, host, uniform_engine(), tokens, positions),
        resources(whole, host, uniform_engine(), tokens, positions),
    )
    for made, paths in ((first, run), (other, whole)):
        serve(made, paths, 3)
    asyncio.run(roll_out_groups.fn(first, GroupRange(12, 2, 4)))  # type: ignore[arg-type]
    resumed = resources(run, host, uniform_engine(), tokens, positions)
    serve(resumed, run, 5)
    asyncio.run(roll_out_groups.fn(resumed, GroupRange(14, 2, 4)))  # type: ignore[arg-type]
    asyncio.run(roll_out_groups.fn(other, GroupRange(12, 4, 4)))  # type: ignore[arg-type]
    assert opponents(run) == opponents(whole) and set(opponents(run)) == {12, 13, 14, 15}
    assert "policy:2" in str(opponents(run)) and "policy:4" not in str(opponents(run))
    assert [file.name for file in (run.league / "local").iterdir()] == ["000004.json"]


def test_a_member_whose_adapter_was_removed_is_named_in_one_sentence(run: RunPaths):
    league = League(run, 4)
    assert league.settings_for(SETTINGS, "local", 12, 4).opponent_versions == {0, 2, 4}
    shutil.rmtree(run.adapter(2))
    with pytest.raises(InputError, match="policy version 2 of run 'run' is in its league in step 4, but its adapter was removed"):
        league.settings_for(SETTINGS, "local", 12, 4)


@pytest.mark.parametrize("table", ["v12", "dumbbot,v12*0.5", "v12+search", "v000012,league"])
def test_a_version_that_no_run_begins_with_is_refused_with_both_ways_to_play_against_one(table: str):
    with pytest.raises(ValidationError, match=r"names v12.*'league'.*--init-from RUN:12") as refused:
        RolloutSettings(opponents=table)
    assert table in str(refused.value)
    assert RolloutSettings(opponents="v0,v0+search,league").opponent_versions == {0}, "a run begins with it"


class Told:
    """Remembers what it serves."""

    def __init__(self) -> None:
        self.served, self.newest = {0}, 0

    async def publish(self, policy: PolicyVersion) -> None:
        self.served.add(policy.version)
        self.newest = policy.version

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        self.served = {version for version in self.served if version >= oldest or version in keep or version == self.newest}


def test_a_member_is_loaded_beside_the_newest_version_and_kept_while_it_plays(run: RunPaths):
    engine: Any = Told()
    nothing: Any = None
    past = PastVersions(run, engine, nothing, always={0})

    async def play() -> None:
        for version in (7, 8):
            await past.publish(PolicyVersion(version=version, adapter=run.adapter(version), adapter_hash="h"))
        await past.retire(6)
        async with past.served([0, 4]) as deciders:
            assert sorted(deciders) == ["policy:0", "policy:4"] and engine.newest == 8
            async with past.served([0, 6]):
                await past.retire(8)
                assert engine.served == {0, 4, 6, 8}
        await past.retire(8)
        assert engine.served == {0, 6, 8}, "the newest league is kept between two steps"

    asyncio.run(play())
    assert past.run_version == 8 and BASE.version == 0


@pytest.mark.parametrize("lag", [0, 2])
def test_no_shard_is_removed_whose_forks_a_league_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: int):
    paths, counted = RunPaths(tmp_path).create(), list[str]()
    newest = {f"local/{step:06d}.arrow": max(0, step - lag) for step in range(60)}  # start group n is of step n + 1
    (paths.shards / "local").mkdir()
    for name in newest:
        (paths.shards / name).write_bytes(b"row")
    monkeypatch.setattr("entente.rollouts.league.tally_shard", lambda path: counted.append(path.name) or {})
    League(paths, start_groups=1)._tally(61)
    age = RunAge(policy_version=60, oldest_checkpoint=58, max_policy_lag=lag)
    going = {file.path.name for file in removable_shards(paths, newest, age, RetentionSettings(shards_gb=1e-9))}
    assert going and counted and not going & set(counted)
