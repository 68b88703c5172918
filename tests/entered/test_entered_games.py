"""Games of other servers come home: every order set is a row."""

import json
from pathlib import Path
from typing import Any

import pytest
from diplomacy import Game
from diplomacy.utils.export import to_saved_game_format

from entente.game.board import POWERS, Board
from entente.game.recorded import recorded_orders
from entente.play.enter import Entry, keep_game
from entente.players.seeds import dice
from storage.played_games import play_again, read_game

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


@pytest.mark.parametrize(("seed", "drawn"), [(0, True), (1, False)], ids=["drawn", "stopped"])
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
    entry = Entry(address=address, account="ours", password="hush", games=("friday",), player="mine:v2")
    kept = keep_game(saved, "friday", "FRANCE", CONTROLLERS, {first: 0.25}, entry, tmp_path)
    file = tmp_path / f"{kept.name}.json"
    read = read_game(file)
    assert [power for power, player in read.seats.items() if player == "mine:v2"] == ["FRANCE"]
    assert set(read.seats.values()) == {"mine:v2", f"rosa@{address}", f"theo@{address}"}
    assert [turn.probabilities for turn in read.turns[:2]] == [{"FRANCE": 0.25}, {}]
    assert len(list(play_again(read, file))) == len(read.turns) > 0
    before = file.read_bytes()
    keep_game(saved, "friday", "FRANCE", CONTROLLERS, {}, entry, tmp_path)
    assert file.read_bytes() == before  # the second time, after a kill, knows less
