"""A scripted player that searches teaches as it would play a match."""

import asyncio
import pickle

from entente.game.board import Board
from entente.pipeline.search_teacher import SearchTeacher
from entente.rollouts.deciders import DecisionRequest
from entente.search.search import SearchDecider
from entente.search.settings import SearchSettings

QUICK = SearchSettings(proposals=3, playouts=6, player=("random",))


def test_it_orders_what_the_player_of_a_match_orders_and_so_does_a_copy():
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    request = DecisionRequest(game="g", dice="g", ply=0, power="FRANCE", legal=legal, board=board, snapshot_id="")
    wanted = asyncio.run(SearchDecider(QUICK, proposer="mover").decide(request))
    teacher = SearchTeacher(QUICK)
    assert teacher("mover", board, "FRANCE", "g") == wanted == pickle.loads(pickle.dumps(teacher))("mover", board, "FRANCE", "g")
    assert repr(QUICK) in repr(teacher), "what shapes the orders names the games"
