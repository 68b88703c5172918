"""Games of other servers come home: every order set is a row."""

import json
from pathlib import Path
from typing import Any

import pytest
from diplomacy import Game

from entente.game.board import POWERS, Board
from entente.game.recorded import recorded_turns
from entente.game.snapshot import make_snapshot
from entente.live_games.entered_file import keep_game
from entente.players.seeds import seeded_rng
from entente.telemetry.errors import InputError
from storage.played_games import SavedGame, play_again, read_game
from tests.game.package_games import saved_form

CONTROLLERS = {power: "rosa" if power < "G" else "theo" for power in POWERS}


def _played(seed: int, phases: int, *, drawn: bool) -> Any:
    """A game of the package as its server saves it: random orders, some units without, and missing disbands.

    Nothing is convoyed in the last phase, because the package judges convoys otherwise, and no later record corrects us.
    """
    game, rng = Game(game_id=f"g{seed}"), seeded_rng("entered", seed)
    for left in reversed(range(phases)):
        if game.is_game_done:
            break
        possible = {
            place: sorted(each for each in orders if left or not (each.endswith(" VIA") or " C " in each))
            for place, orders in game.get_all_possible_orders().items()
        }
        for power in POWERS:
            places = [each for each in game.get_orderable_locations(power) if rng.random() < 0.8]
            skips = game.phase_type == "A" and rng.random() < 0.5
            game.set_orders(power, [] if skips else [rng.choice(possible[place]) for place in places])
        game.process()
    if drawn:
        game.draw()
    return saved_form(game)


def never(sentence: str) -> None:
    """Takes what is left out of a game of which nothing is."""
    raise AssertionError(sentence)


def keep(saved: Any, folder: Path, **how: Any) -> SavedGame:
    """Bring a game home that France played for us."""
    defaults = {"address": "league.example:8432", "player": "mine:v2", "controllers": {}, "probabilities": {}, "say": never}
    return keep_game(saved, "friday", "FRANCE", folder=folder, **(defaults | how))


@pytest.mark.parametrize(("seed", "drawn"), [(0, True), (1, False)], ids=["drawn", "stopped"])
def test_the_orders_of_a_saved_game_lead_to_its_last_position(seed: int, drawn: bool):
    saved = _played(seed, 30, drawn=drawn)
    turns = recorded_turns(saved, "game", never)
    assert [turn.phase for turn in turns] == [phase["name"] for phase in saved["phases"][: len(turns)]]
    assert len(turns) == len(saved["phases"]) - (2 if drawn else 1)
    board, last_orders = Board.start(), {}
    for turn, recorded in zip(turns, saved["phases"], strict=False):
        if turn.position:
            board = Board.restore(make_snapshot(turn.position, turn.phase, source="", game_id="", seed=0))
        assert board.last_orders == last_orders
        last_orders = turn.orders if turn.phase.endswith("M") else last_orders
        _expect(board, recorded["state"])
        legal = board.legal_orders()
        assert board.phase == turn.phase and turn.orders.keys() == legal.keys()
        assert all(legal[power].admits(own) for power, own in turn.orders.items())
        board.step(turn.orders)
    _expect(board, saved["phases"][len(turns)]["state"])


def _expect(board: Board, recorded: Any) -> None:
    assert board.centres() == {power: tuple(sorted(own)) for power, own in recorded["centers"].items()}
    assert board.units() == {
        power: tuple(sorted((unit for unit in own if unit[0] != "*"), key=lambda unit: unit[2:]))
        for power, own in recorded["units"].items()
    }


def test_a_game_is_a_file_of_a_played_game_with_the_others_by_account(tmp_path: Path):
    saved, address = _played(1, 12, drawn=True), "league.example:8432"
    first = saved["phases"][0]["name"]
    kept = keep(saved, tmp_path, probabilities={first: 0.25}, controllers=CONTROLLERS)
    file = tmp_path / f"{kept.name}.json"
    read = read_game(file)
    assert [power for power, player in read.seats.items() if player == "mine:v2"] == ["FRANCE"]
    assert set(read.seats.values()) == {"mine:v2", f"rosa@{address}", f"theo@{address}"}
    assert [turn.probabilities for turn in read.turns[:2]] == [{"FRANCE": 0.25}, {}]
    assert len(list(play_again(read, file))) == len(read.turns) > 0
    before = file.read_bytes()
    keep(saved, tmp_path, controllers=CONTROLLERS)
    assert file.read_bytes() == before  # the second time, after a kill, knows less


def test_a_game_of_the_same_id_or_by_another_seat_is_a_file_of_its_own(tmp_path: Path):
    one, other = (_played(seed, 6, drawn=True) for seed in (1, 2))
    about: dict[str, Any] = {
        "address": "league.example:8432",
        "controllers": CONTROLLERS,
        "probabilities": {},
        "folder": tmp_path,
        "say": never,
    }
    for saved, power, player in ((one, "FRANCE", "mine:v2"), (one, "GERMANY", "dumbbot"), (other, "FRANCE", "mine:v2")):
        keep_game(saved, "friday", power, player=player, **about)
    assert sorted(read_game(file).seats["GERMANY"][:4] for file in tmp_path.glob("*.json")) == ["dumb", "theo", "theo"]


def test_a_convoy_without_the_word_comes_home(tmp_path: Path):
    """The package's server takes such orders, and records them as they were written."""
    game = Game()
    for orders in (["F LON - NTH", "A LVP - YOR"], ["A YOR - BEL", "F NTH C A YOR - BEL"]):
        game.set_orders("ENGLAND", orders)
        game.process()
    saved = saved_form(game)
    assert "A YOR - BEL" in saved["phases"][1]["orders"]["ENGLAND"]
    kept = keep(saved, tmp_path)
    assert kept.turns[1].orders["ENGLAND"][-1] == "A YOR - BEL VIA" and not any(turn.position for turn in kept.turns)


def test_a_game_comes_home_from_a_server_that_judges_otherwise(tmp_path: Path):
    """In its record a unit stands where our rules do not lead, and a unit retreats where others bounced."""
    game = Game()
    game.set_orders("FRANCE", ["A PAR - BUR"])
    game.process()
    game.set_units("FRANCE", ["A RUH", "*A BEL", "A MAR", "F BRE"], reset=True)
    game.set_units("ENGLAND", ["A BEL", "F NTH", "A PIC"], reset=True)
    game.set_current_phase("S1901R")
    game.set_orders("FRANCE", ["A BEL R HOL"])
    game.process()
    game.process()
    saved = saved_form(game)
    kept = keep(saved, tmp_path)
    (file,) = tmp_path.glob("*.json")
    played = list(play_again(read_game(file), file))
    assert [turn.phase for turn in kept.turns if turn.position] == ["S1901R"]
    for phase, recorded in zip(played, saved["phases"], strict=False):
        board = Board.restore(phase.before)
        dislodged = {power: [f"*{unit}" for unit in own] for power, own in board.dislodged().items()}
        assert board.phase == recorded["name"]
        assert {power: {*own, *dislodged[power]} for power, own in board.units().items()} == {
            power: set(own) for power, own in recorded["state"]["units"].items()
        }


def test_a_recorded_order_that_is_not_legal_is_said_and_left_out(tmp_path: Path):
    game = Game()
    game.process()
    saved = saved_form(game)
    saved["phases"][0]["orders"] |= {"FRANCE": ["A PAR - MOS", "A MUN - BUR", "A MAR - SPA"], "ITALY": None}
    said: list[str] = []
    kept = keep(saved, tmp_path, say=said.append)
    assert kept.turns[0].orders["FRANCE"] == ("F BRE H", "A MAR - SPA", "A PAR H")
    assert len(said) == 2 and "'A PAR - MOS' of FRANCE" in said[0] and "is left out" in said[0]


def test_disbands_that_the_record_does_not_show_are_those_of_the_rules(tmp_path: Path):
    game = Game()
    game.set_centers("FRANCE", ["PAR"], reset=True)
    game.set_current_phase("W1901A")
    game.process()
    saved = saved_form(game)
    shown = {"F BRE", "A MAR", "A PAR"} - set(saved["phases"][1]["state"]["units"]["FRANCE"])
    assert {order[:5] for order in keep(saved, tmp_path / "a").turns[0].orders["FRANCE"]} == shown
    saved["phases"][1]["state"]["units"]["FRANCE"] = []
    (orders,) = [turn.orders["FRANCE"] for turn in keep(saved, tmp_path / "b").turns]
    assert len(orders) == 2


@pytest.mark.parametrize("position", ["{", "[]", "{}", "7"])
def test_a_position_that_was_changed_is_named(tmp_path: Path, position: str):
    keep(_played(1, 3, drawn=False), tmp_path)
    (file,) = tmp_path.glob("*.json")
    changed = json.loads(file.read_text())
    changed["turns"][1]["position"] = position
    file.write_text(json.dumps(changed))
    with pytest.raises(InputError, match=r"was changed: it holds no position of F1901M"):
        list(play_again(read_game(file), file))
