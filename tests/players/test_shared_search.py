"""Players that search: forks share what is searched, draws go on meanwhile, rows name who played, and one teaches as it plays."""

import asyncio
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from entente.game.board import POWERS, Board
from entente.players import shared_search as searching
from entente.players.opponents import POLICY
from entente.players.policy import DecisionRequest, PolicyPlayer
from entente.players.search import SearchDecider
from entente.players.search_settings import SearchSettings
from entente.players.shared_search import SearchTeacher, SharedSearch, search_opponents
from entente.rollouts.fork import PlayedFork
from entente.rollouts.groups import StartGroup, decisions_of, phases_of, roll_out
from entente.rollouts.league import tally_fork
from entente.rollouts.settings import RolloutSettings

QUICK = SearchSettings(proposals=2, scripted=(), playouts=4, player=("hold",))
SETTINGS = RolloutSettings(start_groups=1, forks_per_group=3, horizon_years=1)


class Counted:
    """Holds, after a few turns of the event loop; counts who asked, and how many at a time."""

    def __init__(self) -> None:
        self.asked: list[DecisionRequest] = []
        self.concurrency = self.most = 0

    async def decide(self, request: DecisionRequest) -> Sequence[str]:
        self.asked.append(request)
        self.concurrency += 1
        self.most = max(self.most, self.concurrency)
        for _ in range(3):
            await asyncio.sleep(0)
        self.concurrency -= 1
        return [f"{unit} H" for unit in request.legal.sites]


def request(board: Board, power: str, fork: int, shared: str = "p/5/0") -> DecisionRequest:
    legal, game = board.legal_orders()[power], f"{shared}/{fork}"
    return DecisionRequest(
        game=game, rng_name=game, phase_index=0, power=power, legal=legal, board=board, snapshot_id="", shared=shared
    )


def test_forks_that_meet_in_one_position_ask_once_and_with_the_luck_of_their_group():
    one, other, counted = Board.start(), Board.start(), Counted()
    other.step({"FRANCE": ["A PAR - PIC"]})

    async def ask() -> None:
        player = SharedSearch(counted, asyncio.Semaphore(9))
        asked = [request(board, power, fork) for board in (one, other) for power in ("FRANCE", "ITALY") for fork in range(3)]
        found = await asyncio.gather(*map(player.decide, [*asked, request(one, "FRANCE", 0, "p/5/1")]))
        assert all(found[3 * each] == found[3 * each + 1] == found[3 * each + 2] for each in range(4))

    asyncio.run(ask())
    assert [(each.rng_name, each.power) for each in counted.asked] == [("p/5/0", "FRANCE"), ("p/5/0", "ITALY")] * 2 + [
        ("p/5/1", "FRANCE")
    ]
    assert len({(each.game, each.power) for each in counted.asked}) == 5, "requests in progress have names of their own"


def rolled(positions: Any, engine: Any, tokens: Any, names: str, *, past: Any = None) -> list[PlayedFork]:
    settings = SETTINGS.model_copy(update={"opponents": names})

    async def play() -> list[PlayedFork]:
        deciders = search_opponents(settings.searching_opponents, past, tokens)
        groups = [StartGroup(number=0, snapshot=positions[0], power="FRANCE")]
        players = {POLICY: PolicyPlayer(engine, tokens), **deciders}
        return await roll_out(groups, players, settings, producer="p", seed=5)

    return asyncio.run(play())


def test_they_play_what_a_search_with_the_group_s_luck_finds(monkeypatch, positions, uniform_engine, tokens):
    """Oracle: the searching player asked alone."""
    monkeypatch.setattr(searching, "ROLLOUT_SEARCH", QUICK)
    played = rolled(positions, uniform_engine(), tokens, "mover+search")
    assert {row.opponents for row in decisions_of(played)} == {"mover+search"} and all(
        fork.status == "complete" for fork in played
    )
    first = [json.loads(phase_row.orders) for phase_row in phases_of(played) if phase_row.phase_index == 0]
    alone, board = SearchDecider(QUICK, proposer="mover"), Board.restore(positions[0])
    for power in board.legal_orders():
        if power != "FRANCE":
            wanted = asyncio.run(alone.decide(replace(request(board, power, 0), rng_name="p/5/0")))
            assert all(orders[power] == list(wanted) for orders in first)


def test_a_version_that_searches_proposes_under_its_number_and_is_no_member_of_the_league(
    monkeypatch, positions, uniform_engine, tokens
):
    monkeypatch.setattr(searching, "ROLLOUT_SEARCH", QUICK)
    past = uniform_engine()
    played = rolled(positions, uniform_engine(), tokens, "v2+search", past=past)
    assert {row.opponents for row in decisions_of(played)} == {"policy:2+search"}
    assert {asked.version for asked in past.requests} == {2} and all(fork.status == "complete" for fork in played)
    names = [asked.request_id for asked in past.requests]
    assert len(names) == len(set(names)) > 6 and any(name.endswith("/1") for name in names), "two proposals each"
    assert SETTINGS.model_copy(update={"opponents": "v2+search"}).opponent_versions == {2}, "so it is served"
    assert tally_fork("FRANCE", "policy:2+search", dict.fromkeys(POWERS, 3)) == {}


TEACHING = SearchSettings(proposals=3, scripted=(), playouts=6, player=("random",))


def test_a_teacher_orders_what_the_player_of_a_match_orders_and_so_does_a_copy():
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    request = DecisionRequest(game="g", rng_name="g", phase_index=0, power="FRANCE", legal=legal, board=board, snapshot_id="")
    wanted = asyncio.run(SearchDecider(TEACHING, proposer="mover").decide(request))
    teacher = SearchTeacher(TEACHING)
    assert teacher("mover", board, "FRANCE", "g") == wanted == pickle.loads(pickle.dumps(teacher))("mover", board, "FRANCE", "g")
    assert repr(TEACHING) in repr(teacher), "what shapes the orders names the games"
