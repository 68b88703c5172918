"""Orders for seats on webDiplomacy, wherever the site says that some are missing. It tells no results, so none come home."""

import asyncio
from collections import Counter
from collections.abc import Callable

from game.positions import board_of_state
from game.webdiplomacy import WebDiplomacy, WebDiplomacyError, WebSeat
from play.game import Players
from rollouts.deciders import DecisionRequest
from telemetry.errors import EntenteError, InputError

EVERY_S = 60.0
"""Seconds between two looks."""
_MOST_LOOKS = 30
"""Looks in a row that fail, until the command gives up."""
_MOST_TRIES = 3
"""Tries in a row for a seat that fail, until it is left alone."""


class WebSeats:
    """The seats that one key orders for."""

    def __init__(self, web: WebDiplomacy, players: Players, player: str, seed: int, say: Callable[[str], None]) -> None:
        """`player`: a name of `players`; `say` takes sentences for the user."""
        self._web, self._players, self._player, self._seed, self._say = web, players, player, seed, say
        self._failed: Counter[WebSeat] = Counter()

    async def play(self) -> None:
        """Look for missing orders and give them, until Ctrl-C.

        Raises:
            WebDiplomacyError: the first look failed.
            EntenteError: many looks in a row failed, or a decision failed.
        """
        await self._web.missing_orders()
        failures = 0
        while True:
            try:
                await self.look()
                failures = 0
            except WebDiplomacyError as error:
                failures += 1
                if failures == _MOST_LOOKS:
                    raise EntenteError(f"{error}; {failures} looks in a row failed") from error
                if failures == 1:
                    self._say(f"{error}: looking again every {EVERY_S:g} s")
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Give the orders that are missing now.

        Raises:
            WebDiplomacyError: the site does not say which.
            EngineError, DataError: a decision failed.
        """
        try:
            left = await self._web.in_disorder()
        except WebDiplomacyError:
            left = []  # only a site's own bots may order for players who left
        for seat in dict.fromkeys([*await self._web.missing_orders(), *left]):
            if self._failed[seat] == _MOST_TRIES:
                continue
            try:
                await self._order(seat)
                del self._failed[seat]
            except (WebDiplomacyError, InputError) as error:
                self._failed[seat] += 1
                last = "; it is left alone now" if self._failed[seat] == _MOST_TRIES else ""
                self._say(f"{error}{last}")

    async def _order(self, seat: WebSeat) -> None:
        position = await self._web.position(seat)
        board = board_of_state(position.state)
        if (legal := board.legal_orders().get(position.power)) is None:
            return
        name = f"web/{self._seed}/{seat.game}/{board.phase}"
        snapshot_id = board.snapshot(game_id=name, seed=self._seed, source="entered").snapshot_id
        request = DecisionRequest(
            game=name, dice=name, ply=0, power=position.power, legal=legal, board=board, snapshot_id=snapshot_id
        )
        choice = await self._players.choose(self._player, request)
        await self._web.give_orders(position, choice.orders)
        self._say(f"{position.power} ordered in {board.phase} of game {seat.game}: {', '.join(choice.orders)}")
