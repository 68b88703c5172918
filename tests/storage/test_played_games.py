"""Games of people come home as positions to train from."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from game.board import POWERS, Board
from game.players import player
from state_cache.settings import CacheSettings
from state_cache.store import open_cache
from storage.played_games import SavedGame, SavedProposal, SavedTurn, game_files, game_snapshots, named_game
from storage.runs import GAMES_FOLDER
from tasks.preparation import freeze_positions, take_in_games
from telemetry.errors import InputError


def store_game(folder: Path, name: str = "evening", phases: int = 12) -> Path:
    """A game of a person (France), a version (Italy) and scripted players; Italy searched in the first phase."""
    board, dice, turns = Board.start(), random.Random(name), []
    for number in range(phases):
        orders = {power: tuple(player("mover")(own, dice, board)) for power, own in board.legal_orders().items()}
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
        game_snapshots([named_game("evening", games)], games)


def test_positions_of_a_game_are_those_that_it_was_played_on_from(games: Path):
    name = named_game("evening", games)
    found = game_snapshots([name], games)
    turns = json.loads((games / "evening.json").read_text())["turns"]
    assert [snapshot.phase for snapshot in found] == [turn["phase"] for turn in turns]
    assert {(each.game_id, each.source) for each in found} == {("played-evening", "played:human+mine:v2+search+mover")}
    assert Board.restore(found[-1]).phase == turns[-1]["phase"]


def test_a_game_that_went_on_has_another_name_and_is_refused_under_the_old_one(games: Path):
    name = named_game("evening", games)
    store_game(games, phases=13)
    with pytest.raises(InputError, match=rf"names '{name}', but game 'evening' is now 'evening:[0-9a-f]{{8}}': name it so"):
        game_snapshots([name], games)
    with pytest.raises(InputError, match="there is no game 'morning'"):
        named_game("morning", games)
    assert [file.name for file in game_files(games)] == ["evening.json"]


@pytest.mark.filterwarnings("ignore")
def test_a_cache_takes_a_share_of_its_positions_from_games_and_keeps_the_held_out_ones(games: Path, tmp_path: Path):
    scripted = CacheSettings(train_snapshots=8, held_out_snapshots=4, last_year=1903)
    wanted = scripted.model_copy(update={"from_games": (named_game("evening", games),), "on_policy_share": 0.4})
    root = tmp_path / "_state_cache"
    base = asyncio.run(freeze_positions.fn(root, scripted))
    made = asyncio.run(take_in_games.fn(root, wanted, base, games))
    before, after = open_cache(base), open_cache(made, wanted)
    played = [snapshot for snapshot in after.train if snapshot.source.startswith("played:")]
    assert len(played) == 3 and after.held_out == before.held_out and len(after.train) == 8
    assert {snapshot.snapshot_id for snapshot in played} <= {
        each.snapshot_id for each in game_snapshots(wanted.from_games, games)
    }
