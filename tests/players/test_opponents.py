"""Who the policy plays against: scripted players and past versions by lot, whose decisions are not kept."""

import asyncio
import json
import re
from collections import Counter

import pytest
from pydantic import ValidationError

from entente.game.board import POWERS
from entente.players.opponents import POLICY, read_opponents, read_table, sample_opponents, table_text
from entente.players.policy import PolicyPlayer
from entente.rollouts.groups import StartGroup, decisions_of, phases_of, roll_out
from entente.rollouts.settings import RolloutSettings

MIX = RolloutSettings(start_groups=4, forks_per_group=3, horizon_years=1, opponents="hold, mover,territorial")
PAST = MIX.model_copy(update={"opponents": "v12"})


def rolled(positions, engine, tokens, settings: RolloutSettings, deciders=None):
    groups = [StartGroup(number=n, snapshot=positions[n], power=POWERS[n]) for n in range(settings.start_groups)]
    players = {POLICY: PolicyPlayer(engine, tokens), **(deciders or {})}
    return asyncio.run(roll_out(groups, players, settings, producer="p", seed=3))


def lots(text: str, count: int, *, by_seat: bool = False) -> list[dict[str, str]]:
    return [sample_opponents(f"p/3/{number}", read_table(text), POWERS[1:], by_seat=by_seat) for number in range(count)]


@pytest.mark.parametrize("by_seat", [False, True], ids=["group", "seat"])
def test_lots_fall_as_the_weights_say(by_seat: bool):
    found = lots("hold*3,v4,mover*0,random*0.5", 900, by_seat=by_seat)
    assert found == lots("hold*3,v4,mover*0,random*0.5", 900, by_seat=by_seat)
    assert by_seat or all(len(set(seats.values())) == 1 for seats in found), "one lot for all seats"
    sampled = Counter(seats["ITALY"] for seats in found)
    assert set(sampled) == {"hold", "policy:4", "random"}
    for name, share in (("hold", 3 / 4.5), ("policy:4", 1 / 4.5), ("random", 0.5 / 4.5)):
        assert abs(sampled[name] / 900 - share) < 0.05


def test_a_lot_by_seat_depends_on_group_and_power_alone():
    found = lots("hold,mover", 40, by_seat=True)
    assert sum(len(set(seats.values())) == 2 for seats in found) > 30, "seats of a group differ"
    for number, seats in enumerate(found):
        assert sample_opponents(f"p/3/{number}", read_table("hold,mover"), ["ITALY"], by_seat=True) == {"ITALY": seats["ITALY"]}


def test_a_table_is_read_as_it_was_written():
    table = (("dumbbot", 3.0), ("v0", 1.0), ("v12", 0.1 + 0.2))
    assert read_table(table_text(table)) == table and table_text(table[:2]) == "dumbbot*3.0,v0"


def test_rows_name_the_opponents_and_the_forks_of_a_group_share_them(uniform_engine, tokens, positions):
    played = rolled(positions, uniform_engine(), tokens, MIX)
    by_group: dict[int, set[str]] = {}
    for row in decisions_of(played):
        by_group.setdefault(row.start_group, set()).add(row.opponents)
    assert by_group == {number: set(lots(MIX.opponents, 4)[number].values()) for number in by_group}
    assert len({name for names in by_group.values() for name in names}) > 1


def test_a_past_version_decides_for_six_powers_and_none_of_it_becomes_a_row(uniform_engine, tokens, positions):
    policy, other = uniform_engine(), uniform_engine()
    played = rolled(positions, policy, tokens, PAST, {"policy:12": PolicyPlayer(other, tokens, 12)})
    assert {row.opponents for row in decisions_of(played)} == {"policy:12"}
    assert all(row.power == POWERS[row.start_group] for row in decisions_of(played))
    assert len(decisions_of(played)) == len(policy.requests)
    assert {request.version for request in other.requests} == {12}
    assert len(other.requests) > len(policy.requests), "six powers against one"


def test_by_seat_rows_name_who_played_each_power(uniform_engine, tokens, positions):
    """A power that 'hold' plays never moves."""
    by_seat = MIX.model_copy(update={"opponents": "hold,mover", "opponents_by": "seat"})
    played = rolled(positions, uniform_engine(), tokens, by_seat)
    own = {row.start_group: (row.power, row.opponents) for row in decisions_of(played)}
    assert {text.count("=") for _, text in own.values()} == {6}
    moved = set()
    for phase_row in phases_of(played):
        power, text = own[phase_row.start_group]
        seats = read_opponents(text, [other for other in POWERS if other != power])
        for other, orders in json.loads(phase_row.orders).items():
            if other != power and phase_row.phase.endswith("M") and any(" - " in order for order in orders):
                moved.add(seats[other])
    assert moved == {"mover"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(" , ", "has no name", id="no name"),
        pytest.param("mover*0, league*0", "the weights sum to 0", id="weights of nothing"),
        pytest.param("mover*1e308,league*1.5e308", "the weights sum to inf", id="more than a number can be"),
        pytest.param("mover*often", "'mover*often' is not a name and a weight", id="no number"),
        pytest.param("mover*-1", "'mover*-1' is not a name and a weight", id="below 0"),
    ],
)
def test_opponents_that_cannot_be_drawn_are_refused(text: str, sentence: str):
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        RolloutSettings(opponents=text)
