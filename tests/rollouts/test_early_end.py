"""A fork ends where its horizon, its victory, its policy's death or its standstill says so, and tells which."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from entente.game.board import POWERS, Board
from entente.game.snapshot import Snapshot, position_id
from entente.players.opponents import POLICY
from entente.players.policy import PolicyPlayer
from entente.rollouts.fork import ForkPlan, PlayedFork, play_fork
from entente.rollouts.groups import decisions_of, plan_start_groups, roll_out
from entente.rollouts.settings import RolloutSettings


def position(centres: dict[str, list[str]], units: dict[str, list[str]], phase: str = "FALL 1903 MOVEMENT") -> Snapshot:
    """Only these powers are left on the map, with these centres and units."""
    start = Board.start().snapshot(game_id="g", seed=0, source="test")
    told: dict[str, Any] = json.loads(start.position)
    told["phase"] = phase
    for power in told["powers"]:
        power["centers"], power["units"] = centres.get(power["name"], []), units.get(power["name"], [])
        power["influence"] = list(power["centers"])
    text = json.dumps(told)
    return replace(start, position=text, snapshot_id=position_id(text), phase="F1903M")


def fork(snapshot: Snapshot, seats: dict[str, str], **given: Any) -> PlayedFork:
    plan = ForkPlan(
        name="fork",
        shared_name="group",
        seats=dict.fromkeys(POWERS, "hold") | seats,
        temperature=1.0,
        snapshot_id=snapshot.snapshot_id,
        **({"horizon_years": 5} | given),
    )
    return asyncio.run(play_fork(plan, Board.restore(snapshot), {}))


START = Board.start()
CENTRES = {power: list(own) for power, own in START.centres().items()}
UNITS = {power: list(own) for power, own in START.units().items()}


def test_a_fork_plays_to_its_horizon() -> None:
    played = fork(position(CENTRES, UNITS), {})
    assert (played.ended, played.phases[0].phase, played.phases[-2].phase) == ("horizon", "F1903M", "F1907M")


@pytest.mark.parametrize(("years", "last"), [(1, "F1903M"), (3, "F1905M")])
def test_a_fork_ends_when_no_centre_has_changed_hands_for_so_many_years(years: int, last: str) -> None:
    played = fork(position(CENTRES, UNITS), {}, settled_years=years)
    assert (played.ended, played.phases[-2].phase) == ("settled", last)


def test_the_years_are_counted_from_the_last_change() -> None:
    """A French fleet stands in Spain's harbour when the year ends: the count begins anew after it."""
    units = {**UNITS, "FRANCE": ["A SPA", "A PAR", "F BRE"]}
    played = fork(position(CENTRES, units), {"FRANCE": "hold"}, settled_years=2)
    assert played.end is not None and played.end.centres[POWERS.index("FRANCE")] == 4
    assert (played.ended, played.phases[-2].phase) == ("settled", "F1905M")


def test_centres_that_change_owner_but_not_number_are_no_standstill() -> None:
    """Two powers swap a centre: counts stay, owners do not."""
    centres = {"FRANCE": ["PAR", "BRE", "BEL"], "GERMANY": ["MUN", "KIE", "MAR"]}
    units = {"FRANCE": ["A PAR", "A BRE", "A MAR"], "GERMANY": ["A MUN", "A KIE", "A BEL"]}
    played = fork(position(centres, units), {}, settled_years=1)
    assert (played.ended, played.phases[-2].phase) == ("settled", "F1904M")


@pytest.mark.parametrize(
    ("start", "given", "last", "reason"),
    [
        ("S1903M", {"horizon_years": 1}, "F1903M", "horizon"),
        ("F1903M", {"horizon_years": 1}, "F1903M", "horizon"),
        ("S1903M", {"settled_years": 1}, "F1903M", "settled"),
        ("W1903A", {"horizon_years": 1}, "F1904M", "horizon"),
    ],
    ids=["one year", "from autumn", "a standstill", "a fork that begins in winter"],
)
def test_a_fork_ends_before_its_last_winter(start: str, given: dict[str, int], last: str, reason: str) -> None:
    """France has two units too few, in a board where nothing moves: each winter it could build."""
    season = {"S": "SPRING", "F": "FALL", "W": "WINTER"}[start[0]]
    kind = "ADJUSTMENTS" if start.endswith("A") else "MOVEMENT"
    began = replace(position(CENTRES, UNITS | {"FRANCE": ["A PAR"]}, f"{season} 1903 {kind}"), phase=start)
    played = fork(began, {"FRANCE": "hold"}, **given)
    assert (played.ended, played.phases[-2].phase, played.phases[-1].phase) == (reason, last, f"W{last[1:-1]}A")


def test_a_won_fork_says_so() -> None:
    every = [centre for own in CENTRES.values() for centre in own]
    played = fork(position({"FRANCE": every[:17], "ITALY": every[17:]}, {"FRANCE": [f"A {every[17]}"]}), {})
    assert played.ended == "won" and len(played.phases) == 1


def test_a_fork_ends_with_the_last_of_the_policys_powers() -> None:
    """Austria holds nothing but a unit in Italy's last centre but one; when it goes, there is nothing left to learn."""
    centres = {"FRANCE": ["PAR", "MAR"], "AUSTRIA": ["VIE"]}
    units = {"FRANCE": ["A VIE", "A PAR"], "AUSTRIA": []}
    played = fork(position(centres, units), {"AUSTRIA": POLICY})
    assert played.ended == "eliminated" and played.phases[-2].phase == "F1903M"
    assert fork(position(centres, units), {}).ended == "horizon", "scripted games play on"
    assert fork(position(centres, units), {"AUSTRIA": POLICY, "FRANCE": "hold"}).ended == "eliminated"


def test_the_reason_stands_in_every_row(uniform_engine, tokens) -> None:
    centres = {"FRANCE": ["PAR", "BRE", "MAR"], "TURKEY": ["CON", "ANK", "SMY"]}
    units = {"FRANCE": ["A PAR", "A BRE", "A MAR"], "TURKEY": ["A CON", "F ANK", "A SMY"]}
    settings = RolloutSettings(forks_per_group=2, horizon_years=4, opponents="hold")
    groups = plan_start_groups([(position(centres, units), "TURKEY")], 0, settings)
    rows = decisions_of(
        asyncio.run(roll_out(groups, {POLICY: PolicyPlayer(uniform_engine(), tokens)}, settings, producer="p", seed=0))
    )
    assert {(row.fork, row.ended) for row in rows} <= {
        (fork, ended) for fork in (0, 1) for ended in ("settled", "horizon")
    } and rows
    assert all(row.status == "complete" for row in rows)


def test_a_power_with_a_single_legal_order_set_is_not_asked() -> None:
    """France must disband its only unit. The fork has no engine that could be asked."""
    centres, units = CENTRES | {"FRANCE": []}, UNITS | {"FRANCE": ["A PAR"]}
    played = fork(position(centres, units, "WINTER 1903 ADJUSTMENTS"), {"FRANCE": POLICY})
    assert (played.ended, played.status, played.decisions) == ("eliminated", "complete", [])
