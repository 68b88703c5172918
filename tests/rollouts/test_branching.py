"""Start groups that branch off others: one board for all their forks, reached by one fork, whatever became of it."""

import asyncio
import json
from collections import defaultdict
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from game.board import Board
from records.rows import Decision, Ply
from rollouts.fork import PlayedFork
from rollouts.roll_out import RolledOut, StartGroup, branch_off, plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from storage.index import SelectionQuery, open_index
from storage.runs import RunPaths
from storage.shards import publish_shard

FORKS, YEARS = 4, 2
SETTINGS = RolloutSettings(start_groups=6, forks_per_group=FORKS, horizon_years=YEARS, settled_years=0, branch_at=(1, 2))
FIRST = 12


def play(engine, tokens, positions, settings: RolloutSettings = SETTINGS, first: int = FIRST) -> RolledOut:
    powers = ["FRANCE" if number % 3 == 0 else "ITALY" for number in range(settings.start_groups)]
    pairs = [(positions[number % len(positions)], power) for number, power in enumerate(powers)]
    groups = plan_start_groups(pairs, first, settings)
    return asyncio.run(roll_out(groups, engine, tokens, settings, producer="local", seed=3))


@pytest.fixture(scope="module")
def branched(tokens, positions) -> RolledOut:
    from tests.conftest import UniformEngine

    return play(UniformEngine(), tokens, positions)


def plies_of(played: RolledOut) -> dict[int, dict[int, list[Ply]]]:
    found: dict[int, dict[int, list[Ply]]] = defaultdict(lambda: defaultdict(list))
    for ply in played.plies:
        found[ply.start_group][ply.fork].append(ply)
    return found


def test_all_forks_of_a_branch_begin_at_one_board_that_one_fork_of_its_origin_reached(branched, positions):
    groups = plies_of(branched)
    assert sorted(groups) == list(range(FIRST, FIRST + 6))
    for origin in (FIRST, FIRST + 3):
        assert groups[origin][0][0].snapshot_id == positions[(origin - FIRST) % 8].snapshot_id
        for number, branch in enumerate((origin + 1, origin + 2), start=1):
            (board,) = {plies[0].snapshot_id for plies in groups[branch].values()}
            movements = [[ply for ply in plies[1:] if ply.phase.endswith("M")] for plies in groups[origin].values()]
            assert board in {later[number - 1].snapshot_id for later in movements if len(later) >= number}
            assert len(groups[branch]) == FORKS


def test_its_first_decisions_faced_the_very_same_prompt_and_legal_orders(branched):
    first: dict[tuple[int, str], set[tuple]] = defaultdict(set)
    for row in branched.decisions:
        if row.start_group % 3 and row.ply == 0:
            first[row.start_group, row.phase].add(tuple(row.input_ids[: row.prompt_len]))
    assert len(first) == 4 and all(len(prompts) == 1 for prompts in first.values())
    later: dict[tuple[int, str], set[tuple]] = defaultdict(set)
    for row in branched.decisions:
        if row.start_group % 3 == 0 and row.ply > 0:
            later[row.start_group, row.phase].add(tuple(row.input_ids[: row.prompt_len]))
    assert max(map(len, later.values())) > 1, "plain forks of a later phase stand at different boards"


def test_the_policy_plays_the_same_power_in_a_branch_as_in_its_origin(branched):
    assert {row.power for row in branched.decisions} == {"FRANCE"}


def test_a_branch_ends_when_its_origin_would_have(branched):
    ends = {group: {plies[-1].phase for plies in forks.values()} for group, forks in plies_of(branched).items()}
    year = {group: {int(phase[1:5]) for phase in phases} for group, phases in ends.items()}
    for origin in (FIRST, FIRST + 3):
        assert year[origin] == year[origin + 1] == year[origin + 2]


def test_branching_changes_nothing_for_the_groups_that_are_branched_from(branched, uniform_engine, tokens, positions):
    alone = SETTINGS.model_copy(update={"branch_at": (), "start_groups": 6})
    plain = play(uniform_engine(), tokens, positions, alone)
    mine = {row.decision_id: row for row in branched.decisions if row.start_group % 3 == 0}
    assert mine and all(bare(row) == bare(mine[row.decision_id]) for row in plain.decisions if row.start_group % 3 == 0)


def bare(row: Decision) -> list[object]:
    """Its columns, without what it took."""
    row = replace(row, queue_ms=0.0, prefill_ms=0.0, decode_ms=0.0, engine_ms=0.0)
    values = (getattr(row, field.name) for field in fields(Decision))
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


def test_the_same_branches_come_out_again(branched, uniform_engine, tokens, positions):
    again = play(uniform_engine(), tokens, positions)
    assert [bare(row) for row in again.decisions] == [bare(row) for row in branched.decisions]


def branches(forks: list[PlayedFork], origin: StartGroup) -> list[str]:
    own = StartGroup(number=origin.number + 1, snapshot=origin.snapshot, power="ITALY", branch_at=1)
    return [branch_off(own, origin, forks, f"name-{seed}").snapshot.snapshot_id for seed in range(20)]


def test_which_board_is_taken_does_not_hang_on_what_came_after_it(branched, tokens, positions, uniform_engine):
    """Played on in another way from there, and ended with other scores, the same forks give the same boards."""
    from rollouts.fork import POLICY, ForkPlan, play_fork

    origin = StartGroup(number=0, snapshot=positions[0], power="FRANCE")
    seats = dict.fromkeys(("AUSTRIA", "ENGLAND", "GERMANY", "ITALY", "RUSSIA", "TURKEY"), "random") | {"FRANCE": POLICY}
    found = []
    for years in (1, 3):
        plans = [
            ForkPlan(
                name=f"f{fork}",
                shared_name="s",
                seats=seats,
                horizon_years=years,
                temperature=1.0,
                snapshot_id=origin.snapshot.snapshot_id,
            )
            for fork in range(FORKS)
        ]
        boards = [Board.restore(positions[0]) for _ in plans]
        played = [
            asyncio.run(play_fork(plan, board, uniform_engine(), tokens)) for plan, board in zip(plans, boards, strict=True)
        ]
        for fork in played if years == 3 else ():
            fork.end, fork.ended = fork.start, "won"
        found.append(branches(played, origin))
    assert found[0] == found[1] and len(set(found[0])) > 1


def test_a_branch_nobody_reached_begins_at_its_own_position(tokens, positions, uniform_engine):
    far = SETTINGS.model_copy(update={"branch_at": (9,), "start_groups": 2, "horizon_years": 1})
    groups = plies_of(play(uniform_engine(), tokens, positions, far))
    assert {plies[0].snapshot_id for plies in groups[FIRST + 1].values()} == {positions[1].snapshot_id}


def test_a_failed_fork_is_no_origin(tokens, positions):
    failed = PlayedFork(status="failed")
    origin = StartGroup(number=0, snapshot=positions[0], power="FRANCE")
    own = StartGroup(number=1, snapshot=positions[1], power="ITALY", branch_at=1)
    assert branch_off(own, origin, [failed], "x") == replace(own, branch_at=0)


def test_a_branch_without_its_origin_is_a_group_of_its_own(positions):
    """As the probe's, which is played alone under any number."""
    pairs = [(positions[0], "FRANCE")] * 5
    assert [group.branch_at for group in plan_start_groups(pairs, 1, SETTINGS)] == [0, 0, 0, 1, 2]
    assert [group.branch_at for group in plan_start_groups(pairs, 3, SETTINGS)] == [0, 1, 2, 0, 1]


def test_start_groups_that_do_not_divide_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"start_groups 8 is not a multiple of 3.*branch_at \[1, 2\]: give a multiple"):
        RolloutSettings(start_groups=8, branch_at=(1, 2))


def test_the_rows_are_stored_chosen_and_grouped_like_any(branched, tmp_path):
    paths = RunPaths(tmp_path / "run").create()
    scored = [replace(row, centres_gained=float(row.fork)) for row in branched.decisions]  # or few of so weak a play had spread
    publish_shard(paths, "local", FIRST, scored, branched.plies, {}, next_start_group=FIRST + 6)
    index = open_index(paths)
    query = SelectionQuery(step=1, policy_version=0, max_policy_lag=0, start_groups=6, lineage="main", seed=0)
    rows = index.select_batch(query).rows.to_pylist()
    groups = defaultdict(set)
    for row in rows:
        groups[row["advantage_group"]].add((row["start_group"], row["power"], row["phase"]))
    assert all(len(keys) == 1 for keys in groups.values()) and {row["start_group"] % 3 for row in rows} == {0, 1, 2}


def test_a_board_is_played_on_as_it_was_left(branched):
    """Every stored position of a branch follows from the one before it by the stored orders."""
    for group, forks in plies_of(branched).items():
        for plies in forks.values() if group % 3 else ():
            for now, then in pairwise(plies):
                assert json.loads(now.orders) and now.snapshot_id != then.snapshot_id
