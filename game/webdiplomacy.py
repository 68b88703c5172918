"""webDiplomacy's four routes, through the `diplomacy` package's integration: which seats lack orders, positions, and orders.

The integration logs what goes wrong and returns nothing. Here what it logs is raised.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from telemetry.errors import EntenteError

_LOGGER = "diplomacy.integration.webdiplomacy_net"
_SECONDS = 30
"""For a connection, and again for an answer."""


class WebDiplomacyError(EntenteError):
    """A route did not answer as it should; the next time it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSeat:
    """A country of a game."""

    game: int
    country: int
    """Number of the country on its map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebPosition:
    """A position that lacks orders."""

    power: str
    state: dict[str, Any]
    """As `diplomacy.Game.get_state` gives it, with the map's name."""
    game: Any
    """The package's game, with which orders are given."""


class WebDiplomacy:
    """The routes of one site."""

    def __init__(self, url: str, key: str) -> None:
        """`url`: that of api.php. One process speaks to one site, because the package reads its address once."""
        os.environ["API_WEBDIPLOMACY"] = url
        from diplomacy.integration.webdiplomacy_net.api import API

        self._api: Any = API(key, connect_timeout=_SECONDS, request_timeout=_SECONDS)
        self.url = url

    async def missing_orders(self) -> list[WebSeat]:
        """Seats of the key's account that lack orders.

        Raises:
            WebDiplomacyError: the site cannot be reached, or does not answer as it should.
        """
        with self._heard():
            return _seats(await self._api.list_games_with_missing_orders())

    async def in_disorder(self) -> list[WebSeat]:
        """Seats that their players have left, if the key may order for them.

        Raises:
            WebDiplomacyError: see `missing_orders`.
        """
        with self._heard():
            return _seats(await self._api.list_games_with_players_in_cd())

    async def position(self, seat: WebSeat) -> WebPosition:
        """The position of the game.

        Raises:
            WebDiplomacyError: see `missing_orders`.
        """
        with self._heard(f"game {seat.game}"):
            game, power = await self._api.get_game_and_power(seat.game, seat.country, max_phases=1)
        if game is None:
            raise WebDiplomacyError(f"{self.url} gives no position of game {seat.game}")
        return WebPosition(power=power, state=game.get_state() | {"map": game.map_name}, game=game)

    async def give_orders(self, position: WebPosition, orders: tuple[str, ...]) -> None:
        """Give the power's orders and say that it is ready.

        Raises:
            WebDiplomacyError: they were not taken as they were given, or see `missing_orders`.
        """
        with self._heard(f"game {position.game.game_id}"):
            taken = await self._api.set_orders(position.game, position.power, list(orders), wait=False)
        if not taken:
            raise WebDiplomacyError(f"{self.url} did not take the orders of {position.power} in game {position.game.game_id}")

    @contextmanager
    def _heard(self, what: str = "") -> Iterator[None]:
        """Raise what the package logs as a warning or an error, and what it cannot read."""
        heard = _Heard()
        logger = logging.getLogger(_LOGGER)
        logger.addHandler(heard)
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            heard.said.append(f"its answer cannot be read: {type(error).__name__} {error}")
        finally:
            logger.removeHandler(heard)
        if heard.said:
            where = f"{self.url}, {what}" if what else self.url
            raise WebDiplomacyError(f"{where}: {' '.join(heard.said[0].split())[:300]}")


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _seats(found: Any) -> list[WebSeat]:
    return [WebSeat(game=int(each.game_id), country=int(each.country_id)) for each in found]
