"""Teachers' games are played once, on any number of processes alike; a teacher that orders illegally leaves nothing behind."""

import json
import random
import shutil
from pathlib import Path

import pytest

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.scripted import player
from entente.telemetry.errors import DataError
from entente.training.imitation import teacher_games
from entente.training.imitation.positions import Positions
from entente.training.imitation.teacher_games import GAMES_A_SHARD, make_games
from storage.arrow_files import map_arrow
from storage.control import code_of_play
from tests.damage import flip
from tests.training.imitation.small import SMALL, content, quiet


def test_only_missing_shards_are_played_and_more_games_keep_those_that_are_there(tmp_path: Path):
    few = SMALL.model_copy(update={"games": 2})
    folder = make_games(tmp_path, few, 1, quiet)
    before, told = content(folder), []
    more = few.model_copy(update={"games": 2 * GAMES_A_SHARD})
    assert make_games(tmp_path, more, 1, lambda stage, done, total: told.append((done, total))) == folder
    assert told == [(2 * GAMES_A_SHARD, 2 * GAMES_A_SHARD)] and before.items() < content(folder).items()
    assert make_games(tmp_path, more.model_copy(update={"seed": 1}), 1, quiet) != folder


def test_games_of_a_program_that_plays_differently_are_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few = SMALL.model_copy(update={"games": 2})
    folder = make_games(tmp_path, few, 1, quiet)
    monkeypatch.setattr(teacher_games, "code_of_play", lambda _: {**code_of_play(), "entente.players": "changed"})
    assert make_games(tmp_path, few, 1, quiet) != folder


@pytest.mark.system
def test_processes_play_the_games_that_one_process_plays(tmp_path: Path):
    settings = SMALL.model_copy(update={"games": 2 * GAMES_A_SHARD})
    alone, together = (make_games(tmp_path / str(count), settings, count, quiet) for count in (1, 2))
    assert content(alone) == content(together) and len(content(alone)) == 2


def test_a_game_is_that_of_a_plain_loop(games: Path):
    rng = random.Random("teacher game 1 of seed 0")
    seats = {power: player(rng.choice(SMALL.teachers)) for power in Board.start().centres()}
    board, positions = Board.start(), Positions(games)
    for number in positions.training.tolist():
        restored, orders = positions.board(number)
        wanted = {power: seats[power](legal, rng, board) for power, legal in board.legal_orders().items()}
        assert (restored.phase, restored.units(), orders) == (board.phase, board.units(), wanted)
        board.step(wanted)
        if board.year > SMALL.last_year:
            return


def test_an_illegal_teacher_is_named_and_no_shard_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(legal: LegalOrders, rng: random.Random, board: Board | None = None) -> list[str]:
        return ["A PAR - MOS"] * legal.picks

    monkeypatch.setattr(teacher_games, "player", lambda name: wrong)
    with pytest.raises(teacher_games.InputError, match=r"ordered A PAR - MOS, .* for AUSTRIA in S1901M of game 0, .* nothing"):
        make_games(tmp_path, SMALL, 1, quiet)
    assert not list(tmp_path.rglob("*.arrow"))


class Searching:
    """Orders by the player's own dice, and notes what it was asked."""

    def __init__(self, text: str = "searching") -> None:
        self.text, self.asked = text, []

    def __repr__(self) -> str:
        return self.text

    def __call__(self, name: str, board: Board, power: str, rng_name: str) -> list[str]:
        self.asked.append((name, power, rng_name))
        return player(name)(board.legal_orders()[power], random.Random(rng_name), board)


def test_a_searching_teacher_orders_by_its_search_and_is_kept_game_by_game(tmp_path: Path):
    settings, search, told = SMALL.model_copy(update={"teachers": ("mover+search",), "games": 3}), Searching(), []
    folder = make_games(tmp_path, settings, 1, lambda stage, done, total: told.append((done, total)), search)
    assert told == [(1, 3), (2, 3), (3, 3)] and len(list(folder.iterdir())) == 3
    phases = [row for file in sorted(folder.iterdir()) for row in map_arrow(file).table.to_pylist()]
    decisions = sum(len(json.loads(phase_row["orders"])) for phase_row in phases)
    assert len({(power, rng_name) for _, power, rng_name in search.asked}) == len(search.asked) == decisions, (
        "each has its own luck"
    )
    assert {name for name, *_ in search.asked} == {"mover"}
    assert make_games(tmp_path, settings, 1, quiet, Searching("deeper")) != folder, "another search plays other games"
    plain = make_games(tmp_path, SMALL, 1, quiet)
    assert make_games(tmp_path, SMALL, 1, quiet, search) == plain, "a search that nobody uses changes nothing"


def test_held_out_games_are_never_learned_from_and_each_epoch_has_every_position_once(games: Path):
    positions = Positions(games)
    rows = map_arrow(next(games.iterdir())).table
    numbers = rows["start_group"].to_numpy()
    assert {int(game) for game in numbers[positions.held_out]} == {0}
    assert {int(game) for game in numbers[positions.training]} == set(range(1, GAMES_A_SHARD))
    size = len(positions.training)
    epochs = [[positions.of_step(step, 1, 5)[0] for step in range(first, first + size)] for first in (0, size)]
    assert all(sorted(epoch) == sorted(positions.training.tolist()) for epoch in epochs) and epochs[0] != epochs[1]
    assert Positions(games).of_step(2, 3, 5) == epochs[0][6:9] != Positions(games).of_step(2, 3, 6)
    fewer = Positions(games, 3)
    assert {int(game) for game in numbers[fewer.training]} == {1, 2}


@pytest.mark.parametrize(("kind", "cure"), [("scripted-1", "remove it;"), ("recorded-1", "remove its folder;")])
def test_a_copy_of_a_shard_and_a_damaged_one_are_refused_with_what_makes_their_games_again(
    games: Path, tmp_path: Path, kind: str, cure: str
):
    folder = shutil.copytree(games, tmp_path / kind)
    copy = Path(shutil.copy(folder / "000000.arrow", folder / "000008.arrow"))
    with pytest.raises(DataError, match=f"000008.arrow holds the games from 0 on: it is a copy or was renamed; {cure}"):
        Positions(folder)
    flip(copy)
    with pytest.raises(DataError, match=f"000008.arrow .*{cure}"):
        Positions(folder)
