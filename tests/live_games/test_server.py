"""The server of a game: who may ask, what it answers, and that a page in another window waits for changes."""

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from entente.live_games.game import PlayedGame
from entente.live_games.http_server import make_server, serve
from entente.live_games.server import play_app

ADDRESS, KEY = "127.0.0.1:8765", "the-key"


@pytest.fixture
def game(new_game) -> PlayedGame:
    return new_game("FRANCE")


def ask(game: PlayedGame, talk: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        app = play_app(game, ("dumbbot",), KEY, ADDRESS)
        transport = httpx.ASGITransport(app)  # pyright: ignore[reportArgumentType]
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{ADDRESS}", headers={"x-entente-key": KEY}) as client:
            return await talk(client)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({"x-entente-key": "another"}, 403, "the key of this address is missing or old"),
        ({"host": "evil.example"}, 403, "on this machine only"),
        ({"origin": "http://evil.example"}, 403, "comes from another page"),
    ],
)
def test_other_hosts_pages_and_keys_are_refused_at_every_address(game, headers, status, said):
    async def talk(client: httpx.AsyncClient) -> None:
        for answer in (
            await client.get("/", headers=headers),
            await client.get("/game", headers=headers),
            await client.get("/saved", headers=headers),
            await client.post("/orders", headers=headers, json={"power": "FRANCE", "orders": [], "revision": 0}),
        ):
            assert answer.status_code == status and said in answer.json()["error"]

    ask(game, talk)
    assert game.revision == 0 and not game.pending


def test_orders_are_played_and_bad_requests_get_a_sentence(game):
    async def talk(client: httpx.AsyncClient) -> None:
        async def post(path: str, **body: Any) -> tuple[int, str]:
            answer = await client.post(path, json=body)
            return answer.status_code, answer.json().get("error", "")

        assert await post("/orders", power="FRANCE", orders=["A PAR - MOS"], revision=0) == (
            400,
            "'A PAR - MOS' is no legal order of FRANCE in S1901M, or a second one for its place",
        )
        assert (await post("/orders", power="FRANCE", orders="A PAR H", revision=0))[0] == 400
        assert (await post("/orders", power="FRANCE", orders=[], revision=0, more=1))[0] == 400
        assert (await post("/orders", power="FRANCE", orders=[], revision=7))[0] == 409
        assert (await client.post("/orders", content=b"x" * 20_000)).status_code == 413
        assert (await client.get("/nothing")).json() == {"error": "Not Found"}
        answer = (await client.post("/orders", json={"power": "FRANCE", "orders": ["A PAR - BUR"], "revision": 0})).json()
        assert answer["phases"][0]["orders"]["2"][2] == ["A PAR - BUR", []] and answer["phases"][1]["short"] == "F1901M"
        assert answer["waits"] == [2] and answer["legal"]["2"]["sites"][0] == "F BRE"
        assert (await post("/undo", turn=0, revision=answer["revision"])) == (200, "")
        assert game.board.phase == "S1901M"

    ask(game, talk)


def test_a_failed_decision_is_said_and_the_game_waits(game, bots):
    bots.fails = True

    async def talk(client: httpx.AsyncClient) -> None:
        answer = await client.post("/orders", json={"power": "FRANCE", "orders": [], "revision": 0})
        assert answer.status_code == 502 and answer.json()["error"] == "the engine is lost; the game waits: try again"
        bots.fails = False
        again = await client.post("/next", json={"revision": answer.json()["state"]["revision"]})
        assert again.status_code == 200 and len(again.json()["phases"]) == 2

    ask(game, talk)


def test_a_page_waits_for_a_change_that_another_window_makes(game):
    async def talk(client: httpx.AsyncClient) -> None:
        waiting = asyncio.ensure_future(client.get("/game?seen=0"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await client.post("/orders", json={"power": "FRANCE", "orders": [], "revision": 0})
        assert (await waiting).json()["revision"] > 0

    ask(game, talk)


def test_a_page_that_waits_is_answered_when_the_server_ends(game, caplog):
    async def run() -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        server = make_server(play_app(game, ("dumbbot",), KEY, address), drain_s=1, on_shutdown=lambda: game.changed.set())
        serving = asyncio.create_task(serve(server, listener, on_ready=lambda: None))
        async with httpx.AsyncClient(base_url=f"http://{address}", headers={"x-entente-key": KEY}, timeout=60) as client:
            await client.get("/saved")
            waiting = asyncio.create_task(client.get("/game?seen=0"))
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            answer = await waiting
        await serving
        return answer.status_code

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert asyncio.run(run()) == 200 and caplog.text == ""
    finally:
        signal.signal(signal.SIGINT, former)


def test_the_page_loads_nothing_from_elsewhere_and_a_name_cannot_leave_its_script(new_game, bots):
    bots.names = (*bots.names, "</script><b>")
    game = new_game("FRANCE")
    game.seats["ITALY"] = "</script><b>"

    async def talk(client: httpx.AsyncClient) -> None:
        answer = await client.get("/")
        assert "</script><b>" not in answer.text and len(answer.content) < 200_000
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy

    ask(game, talk)


def test_a_game_of_any_name_can_be_saved_and_the_name_ends_no_header(new_game, bots):
    game = new_game("FRANCE")
    game.name = '../a"\r\nset-cookie: x=ü'

    async def talk(client: httpx.AsyncClient) -> None:
        for path in ("/saved", "/recorded"):
            answer = await client.get(path)
            said = answer.headers["content-disposition"]
            assert answer.status_code == 200 and said.startswith("attachment; filename*=UTF-8''..%2Fa%22%0D%0Aset-cookie"), said

    ask(game, talk)
