"""webDiplomacy through the package's integration, against a stand-in for its four routes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from game.webdiplomacy import WebDiplomacy, WebDiplomacyError
from play.enter_web import WebSeats
from tests.entered.server_process import ROOT

KEY = "a key"
FRANCE = {"unitType": ("Army", "Army", "Fleet"), "terrID": (47, 49, 46)}
"""Paris, Marseilles, Brest, by the site's numbers."""


class Site:
    """The four routes of api.php, for game 7 with France to order. `orders` holds what was given."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.status, self.takes_orders = 200, True

    async def answer(self, request: web.Request) -> web.Response:
        """One request, as the site answers it."""
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.Response(status=401, text="no such key")
        route = request.query["route"]
        if self.status != 200:
            return web.Response(status=self.status, text="the site is being repaired")
        if route == "players/cd":
            return web.Response(status=403, text="this key may not")
        if route == "players/missing_orders":
            return web.json_response([] if self.orders else [{"gameID": 7, "countryID": 2}])
        if route == "game/status":
            return web.json_response(_status())
        given = await request.json()
        if self.takes_orders:
            self.orders.append(given)
        return web.json_response(given["orders"] if self.takes_orders else [])


def _status() -> dict[str, Any]:
    units = [
        {"unitType": kind, "terrID": place, "countryID": 2, "retreating": "No"}
        for kind, place in zip(*FRANCE.values(), strict=True)
    ]
    centres = [{"terrID": place, "countryID": 2} for place in FRANCE["terrID"]]
    phase = {"turn": 0, "phase": "Diplomacy", "units": units, "centers": centres, "orders": []}
    rest = {"gameID": 7, "variantID": 1, "turn": 0, "phase": "Diplomacy", "gameOver": "No", "standoffs": [], "occupiedFrom": []}
    return rest | {"phases": [phase]}


@asynccontextmanager
async def served(site: Site, port: int = 0) -> AsyncIterator[str]:
    """The site's URL while it is served."""
    app = web.Application()
    app.router.add_route("*", "/api.php", site.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/api.php"
    finally:
        await runner.cleanup()


def test_missing_orders_are_given_and_what_the_site_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch, first_orders):
    monkeypatch.setenv("API_WEBDIPLOMACY", "")  # given back at the end
    site, told = Site(), list[str]()

    async def visit() -> None:
        async with served(site) as url:
            api = pytest.importorskip("diplomacy.integration.webdiplomacy_net.api")
            monkeypatch.setattr(api, "API_WEBDIPLOMACY_NET", url)  # another test may have imported it
            web = WebSeats(WebDiplomacy(url, KEY), first_orders(), "first", 0, told.append)
            site.takes_orders = False
            for _ in range(5):
                await web.look()
            assert [sentence for sentence in told if "did not take" in sentence or "Submitted" in sentence] == told
            assert len(told) == 3 and told[-1].endswith("it is left alone now")
            site.takes_orders = True
            web = WebSeats(WebDiplomacy(url, KEY), first_orders(), "first", 0, told.append)
            await web.look()
            await web.look()
            site.status = 500
            with pytest.raises(WebDiplomacyError, match="500"):
                await web.look()
            with pytest.raises(WebDiplomacyError, match="401"):
                await WebDiplomacy(url, "another").missing_orders()

    asyncio.run(visit())
    (given,) = site.orders
    assert (given["gameID"], given["countryID"], given["turn"], given["phase"], given["ready"]) == (7, 2, 0, "Diplomacy", "Yes")
    assert sorted(order["terrID"] for order in given["orders"]) == sorted(FRANCE["terrID"])
    assert "FRANCE ordered in S1901M of game 7" in told[-1]


def test_the_address_is_read_before_the_package_is_imported():
    program = (
        "from game.webdiplomacy import WebDiplomacy; WebDiplomacy('http://a.example/api.php', 'k'); "
        "from diplomacy.integration.webdiplomacy_net import api; print(api.API_WEBDIPLOMACY_NET)"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert found.stdout.strip() == "http://a.example/api.php", found.stderr
