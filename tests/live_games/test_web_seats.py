"""webDiplomacy's API, against answers that a webDiplomacy server of September 2025 gave in a game of our players. Its past phases
are left out, but for the last movements."""

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from diplomacy.integration.webdiplomacy_net.orders import Order

from entente.game import webdiplomacy as module
from entente.game.webdiplomacy import WebDiplomacy, WebDiplomacyError, WebPosition, WebSeat, web_session
from entente.live_games.game import Choice
from entente.live_games.web_seats import WebSeats
from entente.telemetry.errors import InputError

RECORDED = json.loads((Path(__file__).parent / "webdiplomacy_answers.json").read_text())
DECISIONS: dict[str, dict[str, Any]] = RECORDED["decisions"]
KEY = "a key"


class Site:
    """Answers as the server did for one decision; `text` and `status` replace an answer."""

    def __init__(self, decision: dict[str, Any]) -> None:
        self.decision, self.given = decision, list[dict[str, Any]]()
        self.missing = [{"gameID": decision["body"]["gameID"], "countryID": decision["body"]["countryID"]}]
        self.text: str | None = None
        self.packed: bytes | None = None
        """Body of a compressed answer."""
        self.status = 200
        self.takes = len(decision["answer"])

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        route = request.query["route"]
        if self.packed is not None:
            return web.Response(body=self.packed, headers={"content-encoding": "gzip"})
        if self.text is not None or self.status != 200:
            return web.Response(status=self.status, text=self.text or "")
        if route == "players/missing_orders":
            return web.json_response(self.missing)
        if route == "game/status":
            assert dict(request.query) == {"route": route} | {name: str(value) for name, value in self.missing[0].items()}
            return web.json_response(self.decision["status"])
        self.given.append(await request.json())
        return web.json_response(self.decision["answer"][: self.takes])

    @property
    def seat(self) -> WebSeat:
        return WebSeat(game=self.missing[0]["gameID"], country=self.missing[0]["countryID"])


@asynccontextmanager
async def served(site: Site) -> AsyncIterator[WebDiplomacy]:
    app = web.Application()
    app.router.add_route("*", "/api.php", site.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with web_session() as session:
            yield WebDiplomacy(session, f"http://127.0.0.1:{runner.addresses[0][1]}/api.php", KEY)
    finally:
        await runner.cleanup()


def orders_in(decision: dict[str, Any], position: WebPosition) -> list[str]:
    """The orders that were given then, in our spelling and the order of our sites."""
    texts = [Order(each, map_id=1, phase_type=position.board.phase_type).to_string() for each in decision["body"]["orders"]]
    legal = position.board.legal_orders()[position.power]
    if position.board.phase_type == "A":
        return sorted(texts)
    # The package leaves out the kind of a supported unit.
    return [each for options in legal.options for each in options if re.sub(" ([SC]) [AF] ", r" \1 ", each) in texts]


@pytest.mark.parametrize("name", DECISIONS)
def test_a_position_is_read_and_orders_are_sent_as_the_server_took_them(name: str):
    decision = DECISIONS[name]
    site = Site(decision)

    async def visit() -> None:
        async with served(site) as here:
            position = await here.position(site.seat)
            orders = orders_in(decision, position)
            assert position.board.legal_orders()[position.power].admits(orders) and len(orders) == len(decision["body"]["orders"])
            assert bool(position.board.last_orders) == (name != "opening")
            assert await here.give_orders(position, orders) == []
            site.takes -= 1
            (missed,) = await here.give_orders(position, orders)
            assert missed in orders

    asyncio.run(visit())
    given = site.given[0]
    wanted = dict(decision["body"])
    assert sorted(map(repr, given.pop("orders"))) == sorted(map(repr, wanted.pop("orders"))) and given == wanted


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (
            {"status": 403, "text": "A user can only\nview"},
            WebDiplomacyError,
            "refuses game/status with 403: A user can only view",
        ),
        ({"text": ""}, WebDiplomacyError, "answers game/status with nothing: is the key right"),
        ({"text": "<html>"}, WebDiplomacyError, "answers game/status with no JSON: <html>"),
        ({"text": "[" * 200_000}, WebDiplomacyError, "answers game/status with no JSON: "),
        ({"text": '{"variantID": 1e999}'}, WebDiplomacyError, "the status of game .* cannot be read"),
        ({"text": '{"variantID": 1}'}, WebDiplomacyError, "the status of game .* cannot be read"),
        ({"text": '{"variantID": 15}'}, InputError, "is on map 15, and only the standard map is played here"),
    ],
    ids=["refused", "empty", "page", "deep", "endless number", "other form", "other map"],
)
def test_what_the_site_does_not_answer_well_is_a_sentence(change: dict[str, Any], kind: type[Exception], sentence: str):
    site = Site(DECISIONS["opening"])
    site.status, site.text = change.get("status", 200), change["text"]

    async def visit() -> None:
        async with served(site) as here:
            with pytest.raises(kind, match=sentence):
                await here.position(site.seat)

    asyncio.run(visit())


def test_an_answer_of_any_size_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_LARGEST", 1000)
    site = Site(DECISIONS["opening"])

    async def visit() -> None:
        async with served(site) as here:
            site.text = "[" + " " * 998 + "]"
            assert await here.missing_orders() == []
            site.text = "[" + " " * 999 + "]"
            with pytest.raises(WebDiplomacyError, match="answers players/missing_orders with more than 1,000 bytes"):
                await here.missing_orders()
            site.packed = gzip.compress(site.text.encode())
            with pytest.raises(WebDiplomacyError, match="answers players/missing_orders with no JSON"):
                await here.missing_orders()

    asyncio.run(visit())


class Chooses:
    """A player that gives the orders of the record."""

    names = ("it",)

    def __init__(self, orders: Callable[[Any], list[str]]) -> None:
        self._orders, self.asked = orders, 0

    async def choose(self, name: str, request: Any) -> Choice:
        self.asked += 1
        return Choice(orders=tuple(self._orders(request)))


def test_seats_that_lack_orders_get_them_and_a_refusal_is_tried_three_times():
    decision = DECISIONS["opening"]
    site, said = Site(decision), list[str]()

    async def visit() -> None:
        async with served(site) as here:
            orders = orders_in(decision, await here.position(site.seat))
            player = Chooses(lambda request: orders)
            seats = WebSeats(here, player, "it", 0, (), said.append)
            assert await seats.look() == 1
            site.takes -= 1
            assert [await seats.look() for _ in range(5)] == [0] * 5
            assert player.asked == 4, "the third refusal is the last"
            other = WebSeats(here, player, "it", 0, {site.seat.game + 1}, said.append)
            assert await other.look() == 0 and player.asked == 4

    asyncio.run(visit())
    assert "ordered in S1901M" in said[0] and [("did not take" in each) for each in said] == [False, True, True, True]
    assert said[-1].endswith("the rest is left as the site has it")


@pytest.mark.parametrize(
    ("games", "listed", "remarks"),
    [
        ({17}, [71], ["no seat in game 17 lacks orders now; the key has some in game 71"]),
        ({17, 71, 18}, [71, 72], ["no seat in games 17, 18 lacks orders now; the key has some in games 71, 72"]),
        ({17}, [], ["no seat in game 17 lacks orders now, nor in any other game of the key"]),
        ({71}, [71, 72], []),
        ((), [71], []),
    ],
)
def test_a_game_without_a_seat_that_lacks_orders_is_remarked_on_once(
    games: Collection[int], listed: list[int], remarks: list[str], monkeypatch: pytest.MonkeyPatch
):
    site, said = Site(DECISIONS["opening"]), list[str]()
    site.missing = [{"gameID": game, "countryID": 1} for game in listed]

    async def look(_: WebSeats) -> int:
        looks.append(len(said))
        if len(looks) == 2:
            raise InputError("that is enough")
        return 0

    async def visit() -> None:
        async with served(site) as here:
            await WebSeats(here, Chooses(lambda _: []), "it", 0, games, said.append).play()

    looks = list[int]()
    monkeypatch.setattr(WebSeats, "look", look)
    monkeypatch.setattr("entente.live_games.web_seats.LOOK_EVERY_S", 0)
    with pytest.raises(InputError, match="that is enough"):
        asyncio.run(visit())
    assert said == remarks and looks == [len(remarks)] * 2
