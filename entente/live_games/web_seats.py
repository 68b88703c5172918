"""Orders for the seats of one key on webDiplomacy, whenever the site lists some as missing. All state is the site's."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from entente.game.webdiplomacy import WebDiplomacy, WebDiplomacyError, WebSeat
from entente.live_games.game import Players
from entente.players.policy import DecisionRequest
from entente.telemetry.errors import EntenteError, InputError

LOOK_EVERY_S = 60.0
_MOST_FAILED_LOOKS = 30
_MOST_TRIES = 3
"""Failures for one position of a seat before it is left to the site, whose default is a hold."""


class WebSeats:
    def __init__(
        self, web: WebDiplomacy, players: Players, player: str, seed: int, games: Collection[int], say: Callable[[str], None]
    ) -> None:
        """`player`: a name of `players`; `games`: numbers of the games to play, empty: all of the key's."""
        self._web, self._players, self._player, self._seed = web, players, player, seed
        self._games, self._say = games, say
        self._failed: Counter[tuple[WebSeat, str]] = Counter()
        self._given_up: set[tuple[WebSeat, str]] = set()

    async def play(self) -> None:
        """Order until Ctrl-C. Raises WebDiplomacyError if the first look fails, EntenteError if many fail in a row."""
        self._say_absent({seat.game for seat in await self._web.missing_orders()})
        failures = 0
        while True:
            try:
                await self.look()
                failures = 0
            except WebDiplomacyError as error:
                failures += 1
                if failures == _MOST_FAILED_LOOKS:
                    raise EntenteError(f"{error}; {failures} looks in a row failed: run the same command again") from error
                if failures == 1:
                    self._say(f"{error}: trying again every {LOOK_EVERY_S:g} s")
            await asyncio.sleep(LOOK_EVERY_S)

    def _say_absent(self, listed: set[int]) -> None:
        """A remark and no error: a game whose orders are in is not listed either."""
        if absent := sorted(set(self._games) - listed):
            others = f"; the key has some in {_games_text(sorted(listed))}" if listed else ", nor in any other game of the key"
            self._say(f"no seat in {_games_text(absent)} lacks orders now{others}")

    async def look(self) -> int:
        """Give the orders that are missing now; returns for how many seats. Raises WebDiplomacyError if the site lists none."""
        ordered = 0
        for seat in await self._web.missing_orders():
            if self._games and seat.game not in self._games:
                continue
            try:
                ordered += await self._order(seat)
            except (WebDiplomacyError, InputError) as error:
                self._say(f"game {seat.game}: {error}")
        return ordered

    async def _order(self, seat: WebSeat) -> bool:
        position = await self._web.position(seat)
        board, power = position.board, position.power
        tried = seat, board.phase
        if tried in self._given_up or (legal := board.legal_orders().get(power)) is None:
            return False
        name = f"web/{self._seed}/{seat.game}/{board.phase}"
        request = DecisionRequest(
            game=name,
            rng_name=name,
            phase_index=0,
            power=power,
            legal=legal,
            board=board,
            snapshot_id=board.snapshot_id,
        )
        orders = (await self._players.choose(self._player, request)).orders
        missed = await self._web.give_orders(position, orders)
        if missed:
            self._failed[tried] += 1
            last = self._failed[tried] == _MOST_TRIES
            self._given_up |= {tried} if last else set()
            end = "; the rest is left as the site has it" if last else ""
            self._say(f"game {seat.game}: the site did not take {', '.join(missed)} of {power} in {board.phase}{end}")
            return False
        self._say(f"game {seat.game}: {power} ordered in {board.phase}: {', '.join(orders)}")
        return True


def _games_text(games: Sequence[int]) -> str:
    return f"game{'s' * (len(games) > 1)} {', '.join(map(str, games))}"
