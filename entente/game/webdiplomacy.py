"""webDiplomacy's HTTP API: seats that lack orders, their positions, and orders. The `diplomacy` package's integration translates
positions and orders; the requests are our own, because the package's log what goes wrong and return nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from diplomacy.integration.webdiplomacy_net.game import process_phase_dict, state_dict_to_game_and_power
from diplomacy.integration.webdiplomacy_net.orders import Order

from entente.game.board import POWERS, Board
from entente.game.geography import geography
from entente.game.positions import board_of_state
from entente.game.recorded import last_recorded_orders
from entente.telemetry.errors import EntenteError, InputError

_ANSWER_S = 30.0
_LARGEST = 16 << 20
"""Bytes of the largest answer: the status of a long game has a few million."""
_STANDARD = 1
"""The site's number of the standard map."""
_UNREADABLE = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)


class WebDiplomacyError(EntenteError):
    """A request failed; a retry may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSeat:
    game: int
    country: int
    """Number of the country on its map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPosition:
    seat: WebSeat
    power: str
    board: Board
    turn: int
    phase: str
    """The site's name: 'Diplomacy', 'Retreats' or 'Builds'."""
    game: Any
    """The package's game, which finds the paths of convoys."""


def web_session() -> aiohttp.ClientSession:
    """A session for `WebDiplomacy`. It decompresses nothing, because a small compressed answer may be a huge one."""
    return aiohttp.ClientSession(auto_decompress=False, headers={"accept-encoding": "identity"})


class WebDiplomacy:
    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        """`session`: a `web_session`; `url`: of the site's api.php."""
        self.url = url
        self._session, self._headers = session, {"Authorization": f"Bearer {key}"}

    async def missing_orders(self) -> list[WebSeat]:
        """Seats of the key's account that lack orders. Raises WebDiplomacyError."""
        listed = await self._ask("players/missing_orders")
        try:
            return [WebSeat(game=int(each["gameID"]), country=int(each["countryID"])) for each in listed]
        except _UNREADABLE as error:
            raise self._unreadable("players/missing_orders", error) from error

    async def position(self, seat: WebSeat) -> WebPosition:
        """Raises InputError if the game is on another map or its position contradicts itself, else WebDiplomacyError."""
        state = await self._ask("game/status", gameID=seat.game, countryID=seat.country)
        try:
            if int(state["variantID"]) != _STANDARD:
                raise InputError(f"game {seat.game} is on map {state['variantID']}, and only the standard map is played here")
            game, power = cast("tuple[Any, Any]", state_dict_to_game_and_power(state, seat.country, max_phases=1))
            board = board_of_state(game.get_state()).with_last_orders(last_recorded_orders(_phases(state["phases"][:-1])))
            return WebPosition(seat=seat, power=power, board=board, turn=int(state["turn"]), phase=str(state["phase"]), game=game)
        except _UNREADABLE as error:
            raise self._unreadable(f"the status of game {seat.game}", error) from error

    async def give_orders(self, position: WebPosition, orders: Sequence[str]) -> list[str]:
        """Send the power's orders as final; returns those that the site did not take, empty if it took all.
        Raises WebDiplomacyError."""
        kind, game = position.board.phase_type, position.game
        translated = {order: Order(order, map_name=game.map_name, phase_type=kind, game=game) for order in orders}
        body = {
            "gameID": position.seat.game,
            "turn": position.turn,
            "phase": position.phase,
            "countryID": position.seat.country,
            "orders": [each.to_dict() for each in translated.values() if each],
            "ready": "Yes",
        }
        answer = await self._ask("game/orders", body)
        try:
            taken = {Order(each, map_name=game.map_name, phase_type=kind).to_norm_string() for each in answer}
        except _UNREADABLE as error:
            raise self._unreadable("game/orders", error) from error
        return [order for order, each in translated.items() if each.to_norm_string() not in taken]

    async def _ask(self, route: str, body: Mapping[str, Any] | None = None, **query: int) -> Any:
        limit = aiohttp.ClientTimeout(total=_ANSWER_S)
        parameters = {"route": route} | {name: str(value) for name, value in query.items()}
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(
                method, self.url, params=parameters, json=body, headers=self._headers, timeout=limit
            ) as response:
                text = (await self._bounded(response, route)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise WebDiplomacyError(f"{self.url} cannot be reached ({str(error) or type(error).__name__})") from error
        said = " ".join(text.split())[:200]
        if response.status != 200:
            raise WebDiplomacyError(f"{self.url} refuses {route} with {response.status}: {said}")
        if not said:  # seen for a key that the site does not know
            raise WebDiplomacyError(f"{self.url} answers {route} with nothing: is the key right?")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WebDiplomacyError(f"{self.url} answers {route} with no JSON: {said}") from error

    async def _bounded(self, response: aiohttp.ClientResponse, route: str) -> bytes:
        body = bytearray()
        async for part in response.content.iter_any():
            body += part
            if len(body) > _LARGEST:
                raise WebDiplomacyError(f"{self.url} answers {route} with more than {_LARGEST:,} bytes")
        return bytes(body)

    def _unreadable(self, what: str, error: Exception) -> WebDiplomacyError:
        return WebDiplomacyError(f"{self.url}: {what} cannot be read: {type(error).__name__} {error}")


def _phases(listed: Sequence[Any]) -> list[dict[str, Any]]:
    """The last movement phase in the form of a saved game."""
    found = [process_phase_dict(each, map_id=_STANDARD) for each in listed if each["phase"] == "Diplomacy"][-1:]
    for phase in found:
        # The site lists all provinces that a power owns.
        phase["centers"] = {
            power: [each for each in own if each in geography().centres] for power, own in phase["centers"].items()
        }
    return [
        {
            "name": each["name"],
            "state": {"name": each["name"]}
            | {part: {power: each[part].get(power, []) for power in POWERS} for part in ("units", "centers")},
            "orders": {power: each["orders"].get(power, []) for power in POWERS},
        }
        for each in found
    ]
