"""Files of played games are played again, and refused where they were changed."""

import json
import random
from pathlib import Path

import pytest

from entente.game.board import POWERS, Board
from entente.game.scripted import player
from entente.telemetry.errors import InputError
from storage.played_games import SavedGame, SavedProposal, SavedTurn, play_again, read_game
from storage.runs import GAMES_FOLDER


def store_game(folder: Path, name: str = "evening", phases: int = 12) -> Path:
    """A game of a person (France), a version (Italy) and scripted players; Italy searched in the first phase."""
    board, rng, turns = Board.start(), random.Random(name), []
    for number in range(phases):
        orders = {power: tuple(player("mover")(own, rng, board)) for power, own in board.legal_orders().items()}
        tried = SavedProposal(orders=orders["ITALY"], value=4.5, playouts=8, probability=0.25) if not number else None
        turn = SavedTurn(
            phase=board.phase,
            orders=orders,
            probabilities={"ITALY": 0.25} if "ITALY" in orders else {},
            proposals={"ITALY": (tried,)} if tried else {},
        )
        turns.append(turn)
        board.step(orders)
    seats = {power: {"FRANCE": "human", "ITALY": "mine:v2+search"}.get(power, "mover") for power in POWERS}
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(SavedGame(name=name, seats=seats, turns=tuple(turns)).model_dump_json())
    return file


@pytest.fixture
def games(tmp_path: Path) -> Path:
    folder = tmp_path / GAMES_FOLDER
    store_game(folder)
    return folder


def test_a_game_that_was_changed_is_named(games: Path):
    file = games / "evening.json"
    file.write_text(file.read_text().replace('"S1901M"', '"S1902M"'))
    with pytest.raises(InputError, match=r"evening.json' was changed: its orders of S1902M are not legal in S1901M"):
        list(play_again(read_game(file), file))


def test_a_file_that_is_no_json_is_refused(games: Path):
    file = games / "evening.json"
    file.write_text(file.read_text()[:-1])
    with pytest.raises(InputError, match=r"evening.json' is not a game of this program: Invalid JSON"):
        read_game(file)


def test_a_game_is_played_again_phase_by_phase(games: Path):
    (file,) = games.glob("*.json")
    found = [phase.before for phase in play_again(read_game(file), file)]
    turns = json.loads(file.read_text())["turns"]
    assert [snapshot.phase for snapshot in found] == [turn["phase"] for turn in turns]
    assert {(each.game_id, each.source) for each in found} == {("played-evening", "played:human+mine:v2+search+mover")}
    assert Board.restore(found[-1]).phase == turns[-1]["phase"]
