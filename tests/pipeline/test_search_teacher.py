"""A scripted player that searches teaches as it would play a match."""

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from game.board import Board
from pipeline.dry_run import plan_imitation
from pipeline.search_teacher import SearchTeacher
from rollouts.deciders import DecisionRequest
from search.search import SearchDecider
from search.settings import SearchSettings
from training.imitation.settings import ImitationSettings
from training.imitation.work import work_folder

QUICK = SearchSettings(proposals=3, playouts=6, player=("random",))


def test_it_orders_what_the_player_of_a_match_orders_and_so_does_a_copy():
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    request = DecisionRequest(game="g", dice="g", ply=0, power="FRANCE", legal=legal, board=board, snapshot_id="")
    wanted = asyncio.run(SearchDecider(QUICK, proposer="mover").decide(request))
    teacher = SearchTeacher(QUICK)
    assert teacher("mover", board, "FRANCE", "g") == wanted == pickle.loads(pickle.dumps(teacher))("mover", board, "FRANCE", "g")
    assert repr(QUICK) in repr(teacher), "what shapes the orders names the games"


def test_a_plan_says_what_the_search_takes_and_an_unknown_player_is_refused(tmp_path: Path):
    def teacher(*names: str) -> Any:
        return plan_imitation(work_folder(tmp_path, "m"), ImitationSettings(teachers=names, games=10), tmp_path)["teacher"]

    whole, half = teacher("dumbbot+search"), teacher("dumbbot+search", "mover")
    assert whole["games_to_play"] == 10 and whole["search_cpu_s_about"] == pytest.approx(2 * half["search_cpu_s_about"], abs=1)
    assert "search_cpu_s_about" not in teacher("mover")
    with pytest.raises(ValueError, match="no scripted player 'nobody'"):
        ImitationSettings(teachers=("nobody+search",))
