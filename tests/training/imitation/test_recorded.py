"""Recorded games are played again exactly, or refused in a sentence with nothing written."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from diplomacy import Game
from diplomacy.utils.export import to_saved_game_format

from entente.game.recorded import replay_recorded
from entente.telemetry.errors import InputError
from entente.training.imitation.positions import Positions
from entente.training.imitation.settings import ImitationSettings
from entente.training.imitation.teacher_games import make_games


def record(seed: int, phases: int) -> dict[str, Any]:
    """A game of random orders in the untouched engine, as its package saves it. Some units get no order."""
    game, dice = Game(), random.Random(seed)
    for _ in range(phases):
        possible = game.get_all_possible_orders()
        for power in game.powers:
            places = game.get_orderable_locations(power)
            orders = [dice.choice(possible[place]) for place in places if possible[place]]
            if game.phase_type == "A":
                surplus = len(game.powers[power].centers) - len(game.powers[power].units)
                orders = orders[: abs(surplus)]
            game.set_orders(power, orders if game.phase_type == "A" else [each for each in orders if dice.random() < 0.9])
        game.process()
    return json.loads(json.dumps(to_saved_game_format(game)))


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return record(3, 14)


def test_every_phase_of_a_recorded_game_is_met_with_its_orders(saved: dict[str, Any]):
    played = 0
    for phase, (board, orders) in zip(saved["phases"], replay_recorded(saved, "it"), strict=False):
        legal = board.legal_orders()
        assert board.phase == phase["name"]
        for power, own in orders.items():
            assert legal[power].admits(own)
            given = {order.rpartition("/")[0] if order.rpartition("/")[0] in own else order for order in phase["orders"][power]}
            assert given <= {*own} and all(order.split()[2] in ("H", "D") for order in {*own} - given - {"WAIVE"})
        played += 1
    assert played == len(saved["phases"]) - 1


def changed(saved: dict[str, Any], **how: Any) -> dict[str, Any]:
    return copy.deepcopy(saved) | how


def with_order(saved: dict[str, Any]) -> dict[str, Any]:
    wrong = copy.deepcopy(saved)
    wrong["phases"][0]["orders"]["FRANCE"] = ["A PAR - MOS"]
    return wrong


def with_board(saved: dict[str, Any]) -> dict[str, Any]:
    wrong = copy.deepcopy(saved)
    wrong["phases"][3]["state"]["centers"]["FRANCE"] = ["PAR"]
    return wrong


REFUSED = {
    "another map": (lambda saved: changed(saved, map="ancmed"), "the map 'ancmed', and only 'standard'"),
    "unknown rule": (lambda saved: changed(saved, rules=["NO_PRESS", "BUILD_ANY"]), "the rule BUILD_ANY"),
    "illegal order": (with_order, "S1901M has the order 'A PAR - MOS' of FRANCE, which is not legal"),
    "other rules": (with_board, "was judged by other rules: in "),
    "the game before": (lambda saved: saved, "again: give each game once"),
    "no game": (lambda saved: {"phases": [1]}, "is no game as the diplomacy package saves it"),
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_game_that_this_program_would_not_play_so_is_refused_whole(
    tmp_path: Path, saved: dict[str, Any], change: Any, sentence: str
):
    file = tmp_path / "games.jsonl"
    file.write_text(json.dumps(saved) + "\n" + json.dumps(change(saved)) + "\n")
    with pytest.raises(InputError, match=re.escape(sentence)) as refused:
        make_games(tmp_path / "games", ImitationSettings(recorded=(file,)), 1, lambda *told: None)
    assert f"line 2 of '{file}'" in str(refused.value)
    assert not list((tmp_path / "games").glob("*"))


def test_recorded_games_are_read_once_into_positions(tmp_path: Path, saved: dict[str, Any]):
    file = tmp_path / "games.jsonl"
    file.write_text(json.dumps(saved) + "\n\n" + json.dumps(record(4, 3)) + "\n")
    told: list[tuple[str, int, int]] = []
    settings = ImitationSettings(recorded=(file,))
    folder = make_games(tmp_path / "games", settings, 1, lambda *each: told.append(each))
    positions = Positions(folder)
    assert (len(positions.held_out), len(positions.training)) == (14, 3) and told == [("recorded games", 2, 2)]
    told.clear()
    assert make_games(tmp_path / "games", settings, 1, lambda *each: told.append(each)) == folder and not told


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_file_that_holds_no_games_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "games.jsonl"
    file.write_text(f"{text}\n{text}{text}")
    with pytest.raises(InputError, match="line 1 of"):
        make_games(tmp_path / "games", ImitationSettings(recorded=(file,)), 1, lambda *told: None)
