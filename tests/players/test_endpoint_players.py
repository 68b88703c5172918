"""Endpoints in matches and rollouts: their orders are played, counted and kept, and nothing is asked twice."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from entente.evaluation.contestants import resolve_contestants
from entente.evaluation.match_files import answers_file, append_game, match_label, read_games
from entente.evaluation.match_table import conclusions, match_table
from entente.evaluation.matches import GameResult, plan_match, play_match
from entente.evaluation.settings import MatchSettings
from entente.game.board import POWERS, Board
from entente.players import endpoint_client as client_module
from entente.players import endpoint_players as players_module
from entente.players.endpoint import EndpointSettings
from entente.players.endpoint_players import AnswerFile, EndpointPlayers, StoredAnswer
from entente.players.opponents import POLICY, read_opponents, read_table
from entente.players.policy import DecisionRequest, PolicyPlayer
from entente.players.read_answer import AnswerCounts
from entente.rollouts import groups as groups_module
from entente.rollouts.groups import StartGroup, decisions_of, phases_of, roll_out
from entente.rollouts.settings import RolloutSettings
from entente.settings.check_settings import check_settings
from entente.settings.layers import layered_settings
from entente.telemetry.errors import EngineError, InputError
from flows import given_parameters
from tests.players.endpoint_server import EndpointServer, chats, completion, hangs_up, last_orders, plays, slow

QUICK = EndpointSettings()
ROOMY = QUICK.model_copy(update={"answer_tokens": 2 * QUICK.answer_tokens})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"FIRST_PAUSE_S": 0.001, "TIMEOUT_S": 5.0, "RETRIES": 1}.items():
        monkeypatch.setattr(client_module, name, value)


def match_of(player: str) -> MatchSettings:
    return MatchSettings(players=(player,), opponents="random", years=1, endpoint=QUICK)


def played(player: str, folder: Path, settings: EndpointSettings = QUICK, games: int = 7) -> list[GameResult]:
    """The games of a match, as the flow plays them, with their files."""
    match = match_of(player).model_copy(update={"endpoint": settings})
    label = match_label(match, resolve_contestants((player, "random"), "", folder))

    async def play() -> list[GameResult]:
        endpoint = EndpointPlayers([player], answers_file(folder, label), settings)
        plans = plan_match(match, 1)[:games]
        try:
            return await play_match(plans, match, dict(endpoint.deciders), lambda game: append_game(folder, label, game))
        finally:
            await endpoint.close()

    results = asyncio.run(play())
    assert read_games(folder, label).keys() == {game.key for game in results}
    return results


def test_an_endpoint_plays_and_its_match_is_repeated_without_it(tmp_path):
    with EndpointServer(plays) as server:
        first = played(server.player, tmp_path)
    assert all(game.answers[server.player].missing == game.answers[server.player].illegal == 0 for game in first)
    assert sum(game.answers[server.player].answers for game in first) == len(server.requests) >= 14
    assert all(game.rejected == 0 for game in first)
    (games,) = {file for file in tmp_path.glob("*.jsonl") if not file.name.endswith(".answers.jsonl")}
    kept = sorted(games.read_bytes().splitlines())
    games.unlink()
    assert played(server.player, tmp_path) == first, "the endpoint is off"
    assert sorted(games.read_bytes().splitlines()) == kept


def test_what_it_orders_is_played(tmp_path):
    """Oracle: a game whose endpoint holds every unit is the game of the scripted player 'hold'."""

    def holds(handler, body):
        handler.answer(completion("\n".join(f"{' '.join(order.split()[:2])} H" for order in last_orders(body))))

    with EndpointServer(holds) as server:
        endpoint = played(server.player, tmp_path)
    match = match_of("hold")
    scripted = asyncio.run(play_match(plan_match(match, 1), match, {}))
    assert [game.centres for game in endpoint] == [game.centres for game in scripted]


def test_wrong_answers_are_counted_in_games_table_and_sentences(tmp_path):
    def partly(handler, body):
        orders = last_orders(body)
        handler.answer(completion("\n".join([*orders[1:], "A PAR - MOS"])))

    with EndpointServer(partly) as server:
        player, games = server.player, played(server.player, tmp_path, games=3)
    match = match_of(player)
    counts = match_table(games, match).answers[player]
    assert counts.answers == counts.missing == counts.illegal < counts.orders and counts.unparsable == 0
    with EndpointServer(chats) as server:
        player, games = server.player, played(server.player, tmp_path)
    table = match_table(games, match_of(player))
    found = table.answers[player]
    assert found.unparsable == found.answers > 0 and found.missing == found.orders
    assert "orders were missing (100.0%)" in conclusions(table, match_of(player))[0]


def test_an_unfinished_thought_is_no_answer(tmp_path):
    def thinks(handler, body):
        handler.answer(completion("Let me think.\n" + "\n".join(last_orders(body)), "length"))

    with EndpointServer(thinks) as server:
        first = played(server.player, tmp_path, games=1)
        found = first[0].answers[server.player]
    assert found.unparsable == found.answers > 0 and found.missing == found.orders


def needs_room(handler, body):
    if body["max_tokens"] > QUICK.answer_tokens:
        plays(handler, body)
    else:
        handler.answer(completion("Let me think.", "length"))


def test_a_higher_token_limit_is_another_match_and_asks_again(tmp_path):
    with EndpointServer(needs_room) as server:
        low, high = played(server.player, tmp_path, games=1), played(server.player, tmp_path, ROOMY, games=1)
    assert low[0].answers[server.player].missing > 0 == high[0].answers[server.player].missing
    assert len([file for file in tmp_path.glob("*.jsonl") if not file.name.endswith(".answers.jsonl")]) == 2


def test_a_run_that_goes_on_with_a_higher_token_limit_asks_again(tmp_path):
    request = decision(Board.start(), "p/1/0/0", "p/1/0")

    async def ask(settings: EndpointSettings) -> tuple[bool, int]:
        players = EndpointPlayers([server.player], tmp_path / "answers.jsonl", settings)
        answer = await players.answer(server.player, request)
        await players.close()
        return answer.cut_off, len(server.requests)

    with EndpointServer(needs_room) as server:
        assert [asyncio.run(ask(each)) for each in (QUICK, QUICK, ROOMY, ROOMY)] == [(True, 1), (True, 1), (False, 2), (False, 2)]


def test_a_spent_budget_ends_the_match_and_a_larger_one_continues_it(tmp_path, monkeypatch):
    monkeypatch.setattr(players_module, "AT_ONCE", 1)
    with EndpointServer(plays) as server:
        with pytest.raises(InputError, match=r"have used \d+ tokens of endpoint.token_budget 2000"):
            played(server.player, tmp_path, QUICK.model_copy(update={"token_budget": 2000}))
        spent = len(server.requests)
        assert spent == 3, "700 tokens each"
        played(server.player, tmp_path)
        with EndpointServer(plays) as twin:
            whole = played(twin.player, tmp_path / "whole")
            assert len(server.requests) == len(twin.requests) == sum(game.answers[twin.player].answers for game in whole)


def test_a_dying_endpoint_ends_the_match_and_the_answers_before_are_kept(tmp_path):
    good = [plays] * 5

    def dies(handler, body):
        with handler.server.lock:
            behaviour = good.pop() if good else hangs_up
        until = time.monotonic() + 30
        while behaviour is hangs_up and kept() < 5 and time.monotonic() < until:  # an answer on its way is not kept
            time.sleep(0.01)
        behaviour(handler, body)

    def kept() -> int:
        return sum(file.read_text().count("\n") for file in tmp_path.glob("*.answers.jsonl"))

    with EndpointServer(dies) as server, pytest.raises(EngineError, match="gave no answer in 2 tries"):
        played(server.player, tmp_path)
    (answers,) = tmp_path.glob("*.answers.jsonl")
    lines = answers.read_text().splitlines()
    assert len([line for line in lines if not json.loads(line)["failed"]]) == 5
    assert all(json.loads(line)["player"] == server.player for line in lines)


def decision(board: Board, rng_name: str, shared: str = "") -> DecisionRequest:
    legal = board.legal_orders()["FRANCE"]
    return DecisionRequest(
        game=rng_name, rng_name=rng_name, shared=shared, phase_index=0, power="FRANCE", legal=legal, board=board, snapshot_id=""
    )


def test_forks_of_a_group_ask_one_question_and_other_groups_their_own(tmp_path):
    async def ask(player: str) -> None:
        endpoint, board = EndpointPlayers([player], tmp_path / "a.jsonl", QUICK), Board.start()
        decider = endpoint.deciders[player]
        forks = [decision(board, f"p/1/{group}/{fork}", f"p/1/{group}") for group in range(2) for fork in range(4)]
        orders = await asyncio.gather(*(decider.decide(fork) for fork in forks))
        assert all(fork.legal.admits(given) for fork, given in zip(forks, orders, strict=True))
        assert (await endpoint.take_all()).answers == 8 and (await endpoint.take_all()) == AnswerCounts()
        await endpoint.close()

    with EndpointServer(slow) as server:
        asyncio.run(ask(server.player))
        assert len(server.requests) == 2


def test_only_so_many_requests_are_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr(players_module, "AT_ONCE", 2)
    running = peak = 0

    def counted(handler, body):
        nonlocal running, peak
        with handler.server.lock:
            running += 1
            peak = max(peak, running)
        slow(handler, body)
        with handler.server.lock:
            running -= 1

    async def ask(player: str) -> None:
        endpoint, board = EndpointPlayers([player], tmp_path / "a.jsonl", QUICK), Board.start()
        await asyncio.gather(*(endpoint.deciders[player].decide(decision(board, str(n))) for n in range(4)))
        await endpoint.close()

    with EndpointServer(counted) as server:
        asyncio.run(ask(server.player))
    assert peak == 2


def test_an_endpoint_among_the_opponents_of_rollouts(uniform_engine, tokens, positions, tmp_path):
    """Rows name it, and a repeated task asks nothing; that rows and phases fit together is in test_opponents.py."""

    async def rolled(player: str) -> tuple:
        settings = RolloutSettings(
            start_groups=2, forks_per_group=2, horizon_years=1, opponents=f"{player}*2,hold", opponents_by="seat"
        )
        endpoint = EndpointPlayers(settings.endpoints, tmp_path / "answers.jsonl", QUICK)
        groups = [StartGroup(number=n, snapshot=positions[n], power=POWERS[n]) for n in range(2)]
        try:
            players = {POLICY: PolicyPlayer(uniform_engine(), tokens), **endpoint.deciders}
            found = await roll_out(groups, players, settings, producer="p", seed=3)
            return found, await endpoint.take_all()
        finally:
            await endpoint.close()

    with EndpointServer(plays) as server:
        first, counts = asyncio.run(rolled(server.player))
    assert all(fork.status == "complete" for fork in first) and counts.missing == 0 and counts.answers >= len(server.requests) > 6
    for row in decisions_of(first):
        seats = read_opponents(row.opponents, [power for power in POWERS if power != row.power])
        assert set(seats.values()) == {server.player, "hold"}
    again, _ = asyncio.run(rolled(server.player))
    assert [row.orders for row in phases_of(again)] == [row.orders for row in phases_of(first)], "the endpoint is off"


def test_a_lost_endpoint_fails_its_forks_with_a_reason(uniform_engine, tokens, positions, tmp_path, monkeypatch):
    async def rolled(player: str) -> None:
        settings = RolloutSettings(start_groups=1, forks_per_group=2, horizon_years=1, opponents=player)
        endpoint = EndpointPlayers(settings.endpoints, tmp_path / "answers.jsonl", QUICK)
        groups = [StartGroup(number=0, snapshot=positions[0], power="FRANCE")]
        players = {POLICY: PolicyPlayer(uniform_engine(), tokens), **endpoint.deciders}
        with pytest.raises(EngineError, match="2 of 2 forks failed; the first: openai:m@"):
            await roll_out(groups, players, settings, producer="p", seed=3)
        monkeypatch.setattr(groups_module, "MAX_FAILED_SHARE", 1.0)
        found = await roll_out(groups, players, settings, producer="p", seed=3)
        assert len(found) == 2 and all("nothing answers at that address" in fork.reason for fork in found)
        await endpoint.close()

    asyncio.run(rolled("openai:m@http://127.0.0.1:9/v1"))


class _Holds:
    async def decide(self, request: DecisionRequest) -> list[str]:
        return list(request.legal.completed(()))


def test_a_spent_budget_stops_a_run_whose_endpoint_plays_in_few_groups(tmp_path, monkeypatch):
    """Else the forks of these groups failed in every later step, too few of them to stop the run."""
    monkeypatch.setattr(groups_module, "MAX_FAILED_SHARE", 1.0)
    answer = StoredAnswer(key="0", player=NAME, phase="S1901M", power="ITALY", text="", failed="", tokens=5)
    AnswerFile(tmp_path / "answers.jsonl").add(answer)
    settings = RolloutSettings(start_groups=1, forks_per_group=2, horizon_years=1, opponents=NAME)
    start = Board.start().snapshot(game_id="", seed=0, source="")

    async def rolled() -> None:
        endpoint = EndpointPlayers([NAME], tmp_path / "answers.jsonl", QUICK.model_copy(update={"token_budget": 5}))
        group = StartGroup(number=0, snapshot=start, power="FRANCE")
        await roll_out([group], {POLICY: _Holds(), **endpoint.deciders}, settings, producer="p", seed=3)

    with pytest.raises(InputError, match=r"have used 5 tokens of endpoint\.token_budget 5"):
        asyncio.run(rolled())


NAME = "openai:qwen3@http://127.0.0.1:8000/v1"
ALONE = {"rollouts": {"opponents": NAME}}


def test_an_endpoint_is_one_name_of_a_table_with_its_weight():
    assert read_table(f"{NAME}*1,dumbbot*2") == ((NAME, 1.0), ("dumbbot", 2.0))
    settings = RolloutSettings(opponents=f"{NAME}*1,dumbbot*2")
    assert settings.endpoints == (NAME,) and settings.scripted_opponents == ("dumbbot",)


def test_more_than_one_process_that_asks_is_refused():
    with pytest.raises(InputError, match=r"pipeline\.task_runner is 'dask'"):
        layered_settings("laptop", (), {"rollouts": {"opponents": NAME}, "pipeline": {"task_runner": "dask"}})
    check_settings(layered_settings("laptop", (), ALONE))


def test_a_bad_address_is_refused_before_a_run_and_a_search_of_one_before_a_match(tmp_path):
    with pytest.raises(InputError, match="an endpoint is named"):
        layered_settings("laptop", (), {"rollouts": {"opponents": "openai:m@http://host/?key=1"}})
    with pytest.raises(InputError, match="an endpoint cannot search"):
        resolve_contestants((f"{NAME}+search",), "", tmp_path)


def test_a_deployment_names_only_listed_addresses(monkeypatch, tmp_path):
    monkeypatch.setattr(given_parameters, "started_by_deployment", lambda: True)
    monkeypatch.setenv(given_parameters.ROOTS_VARIABLE, str(tmp_path))
    settings = layered_settings("laptop", (), ALONE | {"runs_root": str(tmp_path)})
    with pytest.raises(InputError, match=r"a player at 'http://127\.0\.0\.1:8000/v1'"):
        given_parameters.check_parameters(tmp_path, players=[NAME])
    with pytest.raises(InputError, match=r"a player at 'http://127\.0\.0\.1:8000/v1'"):
        given_parameters.check_parameters(tmp_path, settings=settings)
    monkeypatch.setenv(given_parameters.ADDRESSES_VARIABLE, "http://127.0.0.1:8000/v1")
    given_parameters.check_parameters(tmp_path, players=[NAME], settings=settings)
