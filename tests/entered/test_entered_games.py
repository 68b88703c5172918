"""Games of other servers come home: every order set is a row, and the table counts by opponent."""

import json
from pathlib import Path
from typing import Any

import pytest
from diplomacy import Game
from diplomacy.utils.export import to_saved_game_format

from evaluation.entered import ALL, EnteredSeat, entered_table
from evaluation.intervals import FEWEST_CLUSTERS
from game.board import POWERS, Board
from game.recorded import recorded_orders
from play.entered_games import entered_name, entered_seats, keep_entered
from rollouts.seeds import dice
from storage.played_games import game_rows

CONTROLLERS = {power: "rosa" if power < "G" else "theo" for power in POWERS}


def _played(seed: int, phases: int, *, drawn: bool) -> Any:
    """A game of the package as its server saves it: random orders, some units without, and missing disbands."""
    game, rng = Game(game_id=f"g{seed}"), dice("entered", seed)
    for _ in range(phases):
        if game.is_game_done:
            break
        possible = game.get_all_possible_orders()
        for power in POWERS:
            places = [each for each in game.get_orderable_locations(power) if rng.random() < 0.8]
            skips = game.phase_type == "A" and rng.random() < 0.5
            game.set_orders(power, [] if skips else [rng.choice(possible[place]) for place in places])
        game.process()
    if drawn:
        game.draw()
    return json.loads(json.dumps(to_saved_game_format(game)))


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "stopped"])
@pytest.mark.parametrize("seed", range(2))
def test_the_orders_of_a_saved_game_lead_to_its_last_position(seed: int, drawn: bool):
    saved = _played(seed, 30, drawn=drawn)
    turns = recorded_orders(saved, "game")
    assert [phase for phase, _ in turns] == [phase["name"] for phase in saved["phases"][: len(turns)]]
    assert len(turns) == len(saved["phases"]) - (2 if drawn else 1)
    board = Board.start()
    for phase, orders in turns:
        legal = board.legal_orders()
        assert board.phase == phase and orders.keys() == legal.keys()
        assert all(legal[power].admits(own) for power, own in orders.items())
        board.step(orders)
    last = saved["phases"][len(turns)]["state"]
    assert board.centres() == {power: tuple(sorted(own)) for power, own in last["centers"].items()}
    assert board.units() == {
        power: tuple(sorted((unit for unit in own if unit[0] != "*"), key=lambda unit: unit[2:]))
        for power, own in last["units"].items()
    }


def test_a_game_is_a_file_of_a_played_game_with_the_others_by_account(tmp_path: Path):
    saved, address = _played(1, 12, drawn=True), "league.example:8432"
    first = saved["phases"][0]["name"]
    ours = {"FRANCE": "mine:v2", "ITALY": "mine:v2"}
    kept = keep_entered(saved, "friday", address, ours, CONTROLLERS, {first: {"FRANCE": 0.25}}, tmp_path)
    file = tmp_path / f"{kept.name}.json"
    rows = game_rows(file)
    own = [row for row in rows if row["player"] == "mine:v2"]
    assert {row["power"] for row in own} == {"FRANCE", "ITALY"}
    assert {row["opponents"] for row in own} == {f"mine:v2+rosa@{address}+theo@{address}"}
    assert [row["probability"] for row in own if row["turn"] == 0] == [0.25, None]
    before = file.read_bytes()
    keep_entered(saved, "friday", address, ours, CONTROLLERS, {}, tmp_path)
    assert file.read_bytes() == before  # the second time, after a kill, knows less
    seats = entered_seats("mine:v2", address, tmp_path)
    assert [(seat.power, seat.opponents) for seat in seats] == [
        (power, (f"rosa@{address}", f"theo@{address}")) for power in ("FRANCE", "ITALY")
    ]
    assert sum(seats[0].centres) == sum(len(own) for own in saved["phases"][-1]["state"]["centers"].values())
    assert entered_seats("mine:v2", "other.example:1", tmp_path) == [] == entered_seats("mine:v3", address, tmp_path)


def test_ids_of_any_spelling_have_names_of_their_own():
    names = {entered_name(game, "a:1") for game in ("-x_", "x", "../x", "x/", "é" * 300)} | {entered_name("x", "b:1")}
    assert len(names) == 6 and all("/" not in name and len(name) < 60 for name in names)


def test_the_table_counts_games_by_opponent_and_keeps_quiet_about_few():
    won, lost = (4, 0, 18, 4, 4, 4, 0), (18, 0, 0, 4, 4, 4, 4)
    seats = [
        EnteredSeat(game=f"g{number}", power="FRANCE", opponents=("rosa", "theo") if number < 2 else ("rosa",), centres=centres)
        for number, centres in enumerate([won, lost] * (FEWEST_CLUSTERS // 2))
    ]
    seats.append(EnteredSeat(game="g0", power="ITALY", opponents=("rosa", "theo"), centres=won))
    everybody, rosa, theo = entered_table(seats)
    assert (everybody.opponent, everybody.games) == (ALL, FEWEST_CLUSTERS)
    assert (rosa.opponent, rosa.games) == ("rosa", FEWEST_CLUSTERS) and rosa.measures["win"].interval is not None
    assert (theo.opponent, theo.games) == ("theo", 2) and theo.measures["win"].interval is None
    assert rosa.measures["centres"].mean == pytest.approx((18 * FEWEST_CLUSTERS / 2 + 4) / (FEWEST_CLUSTERS + 1))
    assert theo.measures["win"].mean == pytest.approx(1 / 3)
    assert entered_table([]) == []
