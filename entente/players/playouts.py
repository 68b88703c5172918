"""Playouts: continue a game after one order set of one power, with scripted players, and value the end.

A playout is synchronous and gives what `entente.rollouts.fork.play_fork` gives with the same dice. It is faster because it
records nothing, checks no order, and stops where the value cannot change any more. The caller checks that the order set is legal.
`play_out_apart` plays them in processes, so that searches use all cores; the values are the same.
"""

import asyncio
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from entente.game.board import POWERS, Board
from entente.game.players import Player, player
from entente.game.scores import Standing, compute_standing, horizon_reached, spring_after
from entente.game.snapshot import Snapshot
from entente.players.search_settings import OutlookSettings, SearchSettings
from entente.players.seeds import dice
from entente.telemetry.process_pool import ProcessPool

NamedSet = tuple[Sequence[str], str]
"""A legal order set, and the name of its dice, which seed all seats by phase and power: equal names give equal luck."""


def play_out(board: Board, power: str, sets: Iterable[NamedSet], settings: SearchSettings) -> Iterator[float]:
    """Value for `power` after each order set and scripted play to the horizon; `board` is not changed.

    The first orders of the others depend on the name alone, so sets that share a name share them.

    Raises:
        InputError: a name in `settings.player` is no scripted player.
    """
    first: dict[str, dict[str, Sequence[str]]] = {}
    for orders, name in sets:
        if name not in first:
            first[name] = _scripted(board, _players(name, settings.player), name, skip=(power,))
        standing = _standing_after(board, {**first[name], power: orders}, name, settings.years, settings.player)
        yield value_of(standing, power, settings)


def outlook(board: Board, name: str, settings: OutlookSettings) -> tuple[float, ...]:
    """Share of squared centres of each power of POWERS after one playout from here; `board` is not changed.

    Args:
        name: as in `NamedSet`.
    """
    standing = _standing_after(board, {}, name, settings.years, settings.player)
    return tuple(map(standing.sos_share, POWERS))


def _standing_after(board: Board, given: Mapping[str, Sequence[str]], name: str, years: int, players: Sequence[str]) -> Standing:
    """The standing after the orders of `given`, of all powers or of none, and scripted play to the horizon."""
    seats = _players(name, players)
    start, game = board.phase, board.fork()
    if given:
        game.advance(given)
    while not _is_end(start, game, years):
        game.advance(_scripted(game, seats, name))
    standing = compute_standing(game)
    game.release()
    return standing


def _is_end(start: str, board: Board, years: int) -> bool:
    """True if no more centres change hands before the horizon: a last winter is not played."""
    return horizon_reached(start, spring_after(board.phase) if board.season == "W" else board.phase, years)


def seats_of(name: str, players: Sequence[str]) -> dict[str, str]:
    """Who plays each power in the playout `name`: by lot among `players`."""
    lot = dice(name, "seats")
    return {power: lot.choice(players) for power in POWERS}


def value_of(standing: Standing, power: str, settings: SearchSettings) -> float:
    """Value of a standing for `power`: centres (0 to 34), or share of squared centres (0 to 1; 1 after a solo)."""
    return float(standing.centres[POWERS.index(power)]) if settings.value == "centres" else standing.sos_share(power)


def _players(name: str, players: Sequence[str]) -> dict[str, Player]:
    return {seat: player(who) for seat, who in seats_of(name, players).items()}


def _scripted(board: Board, seats: Mapping[str, Player], name: str, skip: Container[str] = ()) -> dict[str, Sequence[str]]:
    """Orders of all powers but `skip`, seeded as in a fork."""
    phase, legal = board.phase, board.legal_orders()
    return {power: seats[power](legal[power], dice(name, phase, power), board) for power in legal if power not in skip}


async def play_out_apart(
    pool: ProcessPool, board: Board, power: str, sets: Sequence[NamedSet], settings: SearchSettings
) -> list[float]:
    """Values of the playouts of all `sets`, in their order."""
    snapshot = board.snapshot(game_id="", seed=0, source="search")
    parts = [sets[first :: pool.size] for first in range(min(pool.size, len(sets)))]
    values = [0.0] * len(sets)
    found = await asyncio.gather(*(pool.ask(_play_part, snapshot, power, part, settings) for part in parts))
    for first, part in enumerate(found):
        values[first :: pool.size] = part
    return values


def _play_part(snapshot: Snapshot, power: str, sets: Sequence[NamedSet], settings: SearchSettings) -> list[float]:
    return list(play_out(_board(snapshot), power, sets, settings))


@lru_cache(maxsize=64)  # a decision comes back once a round, and many games are in progress
def _board(snapshot: Snapshot) -> Board:
    return Board.restore(snapshot)
