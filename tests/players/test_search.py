"""Search of a decision: legal proposals only, equal luck for all, the best by value, and no engine where none is needed."""

import asyncio
import errno
import multiprocessing
import os
import random
import time
from unittest.mock import Mock

import numpy as np
import pytest
from pydantic import ValidationError

from entente.game.board import Board
from entente.game.scripted import player
from entente.players.changed_orders import changed_orders
from entente.players.playouts import Playouts
from entente.players.policy import DecisionRequest, PolicyPlayer
from entente.players.search import SCENARIOS, SearchDecider, SearchResult, check_search, propose, search
from entente.players.search_settings import SearchSettings
from entente.telemetry.errors import EngineError, InputError
from entente.telemetry.process_pool import ProcessPool

QUICK = SearchSettings(proposals=3, scripted=(), playouts=1, player=("mover",))
"""Proposals race, and no change of the best."""


@pytest.fixture
def autumn() -> DecisionRequest:
    """Autumn 1901, a French army next to an empty centre."""
    board, rng = Board.start(), random.Random(0)
    held = {power: player("hold")(legal, rng) for power, legal in board.legal_orders().items()}
    board.step(held | {"FRANCE": ["A PAR - PIC"]})
    return asked(board, "FRANCE")


def asked(board: Board, power: str) -> DecisionRequest:
    legal = board.legal_orders()[power]
    return DecisionRequest(game="g", rng_name="g", phase_index=0, power=power, legal=legal, board=board, snapshot_id="")


def holding(request: DecisionRequest, **instead: str) -> list[str]:
    return [instead.get(site[2:], f"{site} H") for site in request.legal.sites]


def searched(request: DecisionRequest, proposals: list[list[str]], settings: SearchSettings) -> SearchResult:
    return asyncio.run(search(request.board, request.power, proposals, settings, "luck"))


def test_a_search_prefers_the_set_that_takes_a_centre_and_plays_equal_sets_once(autumn: DecisionRequest):
    hold, take = holding(autumn), holding(autumn, PIC="A PIC - BEL")
    found = searched(autumn, [hold, hold, take], QUICK)
    assert found.orders == take and found.proposals == (tuple(hold), tuple(take))
    assert found.visits == (SCENARIOS, SCENARIOS) and found.values[1] > found.values[0]


def test_values_are_means_of_playouts_whose_luck_every_proposal_shares(autumn: DecisionRequest):
    """Oracle: each proposal played out by hand in the scenarios that it met."""
    sets = [holding(autumn), holding(autumn, PIC="A PIC - BEL"), holding(autumn, BRE="F BRE - MAO")]
    settings = SearchSettings(playouts=1, player=("mover",), years=2)
    found = searched(autumn, sets, settings)
    for place, orders in enumerate(sets):
        playouts = [Playouts(autumn.board, "FRANCE", "luck", settings).value(orders, each) for each in range(found.visits[place])]
        assert found.values[place] == pytest.approx(sum(playouts) / len(playouts))
    assert max(found.visits) == found.visits[found.best] == SCENARIOS


def test_of_two_sets_that_keep_the_centres_the_one_that_can_build_is_better():
    """England owns Norway and may build, if its fleet does not come home."""
    board = Board.start()
    for fleet in ("F EDI - NWG", "F NWG - NWY", "WAIVE", "F NWY - NWG"):
        board.step({"ENGLAND": [fleet]})
    assert board.phase == "F1902M"
    england = asked(board, "ENGLAND")
    home, away = holding(england, NWG="F NWG - EDI"), holding(england)
    found = searched(england, [home, away], SearchSettings(playouts=1, player=("hold",)))
    assert found.orders == away and found.values[:2] == (3.75, 4.0)


def test_what_is_not_legal_is_refused_and_never_played(autumn: DecisionRequest, monkeypatch):
    monkeypatch.setattr(Playouts, "value", lambda *_: pytest.fail("an illegal order set was played out"))
    illegal = holding(autumn, PIC="A PIC - MOS")
    with pytest.raises(InputError, match="was proposed for FRANCE in F1901M and is not a legal movement set"):
        searched(autumn, [holding(autumn), illegal], QUICK)
    with pytest.raises(InputError, match="a search for FRANCE in F1901M has no proposal"):
        searched(autumn, [], QUICK)


def test_a_search_finds_a_set_that_nobody_proposed(autumn: DecisionRequest):
    """Proposed is to hold; an army is next to an empty centre."""
    found = searched(autumn, [holding(autumn)], SearchSettings(playouts=300, player=("hold",)))
    assert "A PIC - BEL" in found.orders
    assert found.proposals[0] == tuple(holding(autumn)) and found.values[found.best] >= found.values[0] + 1
    assert set(found.visits) == {SCENARIOS}, "a change that was dropped early is left out"


@pytest.mark.parametrize(("code", "cure"), [(errno.EROFS, "a writable /dev/shm"), (errno.EMFILE, "more open files")])
def test_a_machine_without_semaphores_is_named(monkeypatch: pytest.MonkeyPatch, code: int, cure: str):
    refuses = Mock(side_effect=OSError(code, os.strerror(code)))
    monkeypatch.setattr("entente.telemetry.process_pool.ProcessPoolExecutor", refuses)
    with pytest.raises(EngineError, match=cure):
        ProcessPool(2)


@pytest.mark.system
def test_processes_find_what_this_process_finds_and_one_that_is_killed_is_an_error(autumn: DecisionRequest):
    settings = SearchSettings(playouts=30, player=("mover", "random"))

    async def apart() -> list[SearchResult]:
        async with ProcessPool(2) as pool:
            decider = SearchDecider(settings, proposer="random", processes=pool)
            found = await asyncio.gather(*(decider.look(autumn) for _ in range(3)))
            waiting = asyncio.ensure_future(pool.ask(time.sleep, 600))
            await asyncio.sleep(0)
            multiprocessing.active_children()[0].kill()
            with pytest.raises(EngineError, match="a worker process died"):
                await waiting
            return [result for result, _ in (*found, await decider.look(autumn))]

    assert asyncio.run(apart()) == [asyncio.run(SearchDecider(settings, proposer="random").look(autumn))[0]] * 4
    assert not multiprocessing.active_children()


def test_changed_orders_are_legal_distinct_and_their_supports_fit_the_set():
    """In every kind of phase of a game, and a support among the changes names what its set orders."""
    board, rng, kinds = Board.start(), random.Random(1), set()
    while board.year < 1905:
        for legal in board.legal_orders().values():
            given = tuple(player("random")(legal, rng))
            found = changed_orders(legal, given, rng)
            kinds.add(legal.kind)
            assert len(found) == len(set(found)) and given not in found and all(map(legal.admits, found))
            for orders in found if legal.kind == "movement" else ():
                new = set(orders) - set(given)
                words = [order.split() for order in orders]
                acts = {" ".join(each[:2]) for each in words}
                acts |= {" ".join((*each[:3], each[3][:3])) for each in words if len(each) > 3}
                assert 1 <= len(new) <= 2
                assert all(order.split(" ", 3)[3] in acts for order in new if order.split()[2] == "S")
        board.step({power: player("mover")(legal, rng, board) for power, legal in board.legal_orders().items()})
    assert len(kinds) == 4


def test_a_move_to_a_named_coast_is_supported():
    board = Board.start()
    board.step({"FRANCE": ["F BRE - MAO"]})
    found = changed_orders(board.legal_orders()["FRANCE"], ["F MAO H", "A MAR H", "A PAR H"], random.Random(1))
    assert ("F MAO - SPA/SC", "A MAR S F MAO - SPA", "A PAR H") in found


def test_a_version_proposes_first_what_it_would_play_alone(uniform_engine, tokens, positions):
    board = Board.restore(positions[0])
    request = asked(board, next(iter(board.legal_orders())))
    settings = SearchSettings(proposals=4, scripted=("dumbbot", "territorial"), playouts=1, player=("mover",))
    sets = [list(orders) for orders in asyncio.run(propose(request, PolicyPlayer(uniform_engine(), tokens, 1), settings))]
    assert sets[0] == asyncio.run(PolicyPlayer(uniform_engine(), tokens, 1).decide(request)).orders
    assert all(request.legal.admits(orders) for orders in sets) and len({tuple(orders) for orders in sets}) == len(sets) > 4
    engine = uniform_engine()
    played = asyncio.run(SearchDecider(settings, policy=PolicyPlayer(engine, tokens, 1)).decide(request))
    assert played in sets and len({each.request_id for each in engine.requests}) == len(engine.requests) == 4
    assert {each.version for each in engine.requests} == {1}


def test_a_look_tells_each_proposal_s_value_and_with_which_probability_the_policy_drew_it(uniform_engine, tokens, positions):
    request = asked(board := Board.restore(positions[0]), next(iter(board.legal_orders())))
    settings = SearchSettings(proposals=2, scripted=("dumbbot",), playouts=1, player=("mover",))
    engine = uniform_engine()
    decider = SearchDecider(settings, policy=PolicyPlayer(engine, tokens, 1))
    found, sampled = asyncio.run(decider.look(request))
    assert found.orders == asyncio.run(SearchDecider(settings, policy=PolicyPlayer(uniform_engine(), tokens, 1)).decide(request))
    assert list(sampled) == list(found.proposals) and len(found.values) == len(sampled)
    table = tokens.tables.table(request.legal)
    for orders, probability in sampled.items():
        counts = np.diff(table.legal_sets(tokens.tables.spell(orders, request.legal))[1])
        if probability is not None:
            assert probability == pytest.approx(float(np.prod(1 / counts)), rel=1e-4)
    assert sampled[found.proposals[-1]] is None and sum(probability is not None for probability in sampled.values()) == 2


def test_without_an_engine_scripted_players_propose(autumn: DecisionRequest):
    decider = SearchDecider(QUICK, proposer="random")
    played = asyncio.run(decider.decide(autumn))
    assert autumn.legal.admits(played) and played == asyncio.run(decider.decide(autumn)), "the same request, the same orders"
    sets = asyncio.run(propose(autumn, None, QUICK.model_copy(update={"proposals": 0, "scripted": ("random",) * 3})))
    assert len(sets) == 3 and tuple(played) in sets


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"proposals": 0, "scripted": ()}, "set search.proposals or search.scripted"),
        ({"player": ()}, "search.player is empty"),
    ],
)
def test_settings_that_cannot_be_searched_are_refused(settings: dict, complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        SearchSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (SearchSettings(scripted=("nobody",)), "no scripted player 'nobody'"),
        (SearchSettings(player=("dumbbot", "nobody")), "no scripted player 'nobody'"),
    ],
)
def test_players_that_do_not_exist_are_refused(settings: SearchSettings, complaint: str):
    with pytest.raises(InputError, match=complaint):
        check_search(settings)
