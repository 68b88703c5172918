"""Who the policy plays against: a scripted player, one of a mix by group, or a frozen version whose decisions are not kept."""

import asyncio
import json
from collections import Counter

import pytest
from pydantic import ValidationError

from game.board import POWERS
from rollouts.deciders import PolicyDecider
from rollouts.roll_out import StartGroup, draw_opponents, frozen_name, roll_out
from rollouts.settings import RolloutSettings

MIX = RolloutSettings(start_groups=4, forks_per_group=3, horizon_years=1, opponents="hold, mover,territorial")
FROZEN = MIX.model_copy(update={"frozen_share": 1.0, "frozen_version": 12})


def rolled(positions, engine, tokens, settings: RolloutSettings, frozen=None):
    groups = [StartGroup(number=n, snapshot=positions[n], power=POWERS[n]) for n in range(settings.start_groups)]
    return asyncio.run(roll_out(groups, engine, tokens, settings, producer="p", seed=3, frozen=frozen))


def test_each_start_group_draws_one_of_the_players_named_and_all_are_drawn_alike():
    drawn = Counter(draw_opponents(f"p/3/{number}", MIX) for number in range(600))
    assert set(drawn) == {"hold", "mover", "territorial"} and min(drawn.values()) > 160
    assert draw_opponents("p/3/7", MIX) == draw_opponents("p/3/7", MIX)


def test_rows_name_the_opponents_and_the_forks_of_a_group_share_them(uniform_engine, tokens, positions):
    played = rolled(positions, uniform_engine(), tokens, MIX)
    by_group: dict[int, set[str]] = {}
    for row in played.decisions:
        by_group.setdefault(row.start_group, set()).add(row.opponents)
    assert by_group == {number: {draw_opponents(f"p/3/{number}", MIX)} for number in by_group}
    assert len({name for names in by_group.values() for name in names}) > 1


def test_opponents_of_the_name_in_the_row_were_the_ones_that_played(uniform_engine, tokens, positions):
    """Against 'hold' nobody but the policy's power moves."""
    holds = MIX.model_copy(update={"opponents": "hold"})
    played = rolled(positions, uniform_engine(), tokens, holds)
    for ply in played.plies:
        if ply.phase.endswith("M"):
            for power, orders in json.loads(ply.orders).items():
                assert power == POWERS[ply.start_group] or all(order.endswith(" H") for order in orders)


def test_a_frozen_version_decides_for_six_powers_and_none_of_it_becomes_a_row(uniform_engine, tokens, positions):
    policy, other = uniform_engine(), uniform_engine()
    played = rolled(positions, policy, tokens, FROZEN, {frozen_name(FROZEN): PolicyDecider(other, tokens, 12)})
    assert {row.opponents for row in played.decisions} == {"policy:12"}
    assert all(row.power == POWERS[row.start_group] for row in played.decisions)
    assert len(played.decisions) == len(policy.requests)
    assert {request.version for request in other.requests} == {12}
    assert len(other.requests) > len(policy.requests), "six powers against one"


def test_the_frozen_share_is_a_share_of_start_groups():
    half = MIX.model_copy(update={"frozen_share": 0.5, "frozen_version": 12})
    names = Counter(draw_opponents(f"p/3/{number}", half) for number in range(600))
    assert 240 < names["policy:12"] < 360 and set(names) == {"policy:12", "hold", "mover", "territorial"}
    assert "policy:12" not in {draw_opponents(f"p/3/{number}", MIX) for number in range(100)}


def test_opponents_that_name_nobody_are_refused():
    with pytest.raises(ValidationError, match="has no name"):
        RolloutSettings(opponents=" , ")
