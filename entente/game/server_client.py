"""One connection to the `diplomacy` package's own server: requests and their answers, without notices.

The messages are the package's own classes. Its `Connection` is not used, because it reconnects on its own, repeats a request that
made the server close the connection, and keeps a whole `Game` for each seat. Here a lost connection raises an error, and the
caller decides whether to try again. This module writes no account data anywhere.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from diplomacy.communication import requests, responses
from diplomacy.utils import exceptions, strings

from entente.game.rules import ENGINE_VERSION
from entente.telemetry.errors import EntenteError, InputError, one_line

CONNECT_S = 30.0
ANSWER_S = 60.0
"""Seconds within which a server must answer; each sign-in blocks it for about one."""
_LARGEST = 64 << 20
"""Bytes of the largest message, as the server has it."""


class ServerLostError(EntenteError):
    """The server cannot be reached, has closed the connection, or does not answer. A retry may succeed."""


class ForeignServerError(InputError):
    """Something listens there that does not speak the protocol of this release."""


class RefusedError(EntenteError):
    """The server refused a request. `kind` is the package's name of the error, such as 'GameIdException'."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGame:
    game: str
    phase: str
    map: str
    rules: tuple[str, ...]
    status: str
    """forming | active | paused | completed | canceled."""
    players: int
    """Powers with a player."""
    seats: int
    """Powers that players must control before the game begins."""
    deadline_s: int
    """Seconds for each phase; 0: as long as it takes."""
    has_password: bool
    mine: tuple[str, ...]
    """Powers that the account controls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGame:
    power: str
    """The power that the server assigned; empty for an observer."""
    state: dict[str, Any]
    """The position, as of `diplomacy.Game.get_state`."""
    controllers: dict[str, str]
    """Account by power; 'dummy' for a power without a player."""
    phases: list[dict[str, Any]] = field(default_factory=list)
    """The phases before it: name, state and orders, as a saved game has them."""


class ServerClient:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse, address: str) -> None:
        self.address = address
        self._socket = socket
        self._turn = asyncio.Lock()  # the server works on one request at a time

    async def sign_in(self, account: str, password: str) -> str:
        return (await self._ask(requests.SignIn(username=account, password=password), responses.DataToken)).data

    async def games(self, token: str, ids: Sequence[str] | None = None) -> list[ServerGame]:
        request = requests.ListGames(token=token) if ids is None else requests.GetGamesInfo(token=token, games=list(ids))
        return [_listed(info) for info in (await self._ask(request, responses.DataGames)).data]

    async def free_powers(self, token: str, game: str) -> list[str]:
        """Powers without a player that are not eliminated, sorted."""
        return sorted((await self._ask(requests.GetPlayablePowers(token=token, game_id=game), responses.DataPowerNames)).data)

    async def join(self, token: str, game: str, power: str | None, password: str | None) -> JoinedGame:
        """Take a power, or rejoin as its account; without a power, observe. The server may assign another one at random."""
        request = requests.JoinGame(token=token, game_id=game, power_name=power, registration_password=password)
        joined = (await self._ask(request, responses.DataGame)).data
        return JoinedGame(
            power=joined.role if power is not None else "",
            state=joined.get_state(),
            controllers={name: each.get_controller() for name, each in joined.powers.items()},
            phases=[
                {"name": str(name), "state": joined.state_history[name], "orders": orders}
                for name, orders in joined.order_history.items()
                if name in joined.state_history
            ],
        )

    async def give_orders(
        self, token: str, game: str, power: str, phase: str, orders: Sequence[str], *, final: bool = True
    ) -> None:
        """Replace the power's orders. If they are `final`, the server need not wait for the deadline."""
        await self._ask(
            requests.SetOrders(
                token=token,
                game_id=game,
                game_role=power,
                phase=phase,
                power_name=power,
                orders=list(orders),
                wait=not final,
            ),
            responses.Ok,
        )

    async def vote_draw(self, token: str, game: str, power: str, phase: str) -> None:
        request = requests.Vote(token=token, game_id=game, game_role=power, phase=phase, power_name=power, vote=strings.YES)
        await self._ask(request, responses.Ok)

    async def saved(self, token: str, game: str, power: str, phase: str) -> dict[str, Any]:
        request = requests.SaveGame(token=token, game_id=game, game_role=power, phase=phase)
        return (await self._ask(request, responses.DataSavedGame)).data

    async def _ask(self, request: Any, kind: type) -> Any:
        """The answer of the package's class `kind`. Raises RefusedError, ServerLostError (closed, or too slow), or
        ForeignServerError (unreadable)."""
        async with self._turn:
            answer = await self._answer(request)
        if not isinstance(answer, kind):
            raise self._foreign(f"its answer to '{request.name}' is '{answer.name}'")
        return answer

    async def _answer(self, request: Any) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._socket.send_str(request.json())
                while (message := await self._socket.receive()).type is aiohttp.WSMsgType.TEXT:
                    if (answer := self._read(message.data, request)) is not None:
                        return answer
        except TimeoutError as error:
            raise ServerLostError(f"{self.address} did not answer '{request.name}' within {ANSWER_S:g} s") from error
        except (ConnectionError, aiohttp.ClientError) as error:
            raise ServerLostError(f"{self.address} has closed the connection") from error
        raise ServerLostError(f"{self.address} has closed the connection")

    def _read(self, text: str, request: Any) -> Any:
        """The answer to the request; None for a notice, and for the late answer to an earlier request."""
        try:
            message = json.loads(text)
            if strings.REQUEST_ID not in message and strings.NOTIFICATION_ID not in message:
                raise ValueError("it answers no request and is no notice")
            if message.get(strings.REQUEST_ID) != request.request_id:
                return None
            return responses.parse_dict(message)
        except exceptions.RequestException as error:
            raise self._foreign(f"it does not know the request '{request.name}'") from error
        except exceptions.ResponseException as error:
            raise RefusedError(type(error).__name__, error.message) from error
        except _UNREADABLE as error:
            raise self._foreign(f"a message of it cannot be read: {one_line(error)[:80]}") from error

    def _foreign(self, what: str) -> ForeignServerError:
        return ForeignServerError(
            f"{self.address} does not speak the protocol of diplomacy {ENGINE_VERSION}: {what}; ask which release it runs"
        )


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, AssertionError, exceptions.DiplomacyException)
"""What the package raises for a message of another protocol."""


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[ServerClient]:
    """A connection to HOST:PORT, ws://HOST:PORT or wss://HOST:PORT. Raises ServerLostError if nothing listens, ForeignServerError
    for another kind of server."""
    url = address if "://" in address else f"ws://{address}"
    async with aiohttp.ClientSession() as session:
        try:
            socket = await asyncio.wait_for(session.ws_connect(url, max_msg_size=_LARGEST), CONNECT_S)
        except aiohttp.ClientConnectorError as error:
            raise ServerLostError(f"nothing listens at {address}: {error.os_error.strerror or error.os_error}") from error
        except aiohttp.WSServerHandshakeError as error:
            raise _other_kind(address, f"it answers with HTTP status {error.status}") from error
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            raise _other_kind(address, "it does not answer as a web server does") from error
        except TimeoutError as error:
            raise ServerLostError(f"{address} did not open a connection within {CONNECT_S:g} s") from error
        async with socket:
            yield ServerClient(socket, address)


def _other_kind(address: str, what: str) -> ForeignServerError:
    return ForeignServerError(f"{address} is not a server of the diplomacy package: {what}")


def _listed(info: Any) -> ServerGame:
    return ServerGame(
        game=info.game_id,
        phase=info.phase,
        map=info.map_name,
        rules=tuple(sorted(info.rules)),
        status=info.status,
        players=info.n_players,
        seats=info.n_controls,
        deadline_s=info.deadline,
        has_password=info.registration_password,
        mine=tuple(sorted(info.controlled_powers)),
    )
