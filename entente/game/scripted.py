"""Scripted players: functions that choose one legal order set, given a power's legal orders, a random generator and the board.

Players return legal, canonical sets (`LegalOrders.admits`) that depend only on the arguments, on any machine."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from math import comb
from typing import TYPE_CHECKING, Protocol

from entente.game.geography import geography, province
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.telemetry.errors import InputError
from entente.telemetry.extensions import Misfit, check_arguments, check_named, load_part

if TYPE_CHECKING:  # entente.game.board loads the engine
    from entente.game.board import Board


class Player(Protocol):
    """Chooses the orders of one power. `board` is the position that the legal orders belong to; a player must not modify it."""

    def __call__(self, legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]: ...


SEARCHES = "+search"
"""Name suffix of a player that searches, such as 'dumbbot+search'; `entente/players/search.py` makes such players."""
MOVE_SHARE = 0.7
"""Probability that `mover` moves a unit that can move. At this value it takes centres and still orders some supports."""


def hold(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Holds every unit, disbands dislodged units, waives builds, and disbands the first units if disbands are owed."""
    if legal.kind is OrderKind.BUILD:
        return [WAIVE] * legal.picks
    if legal.kind is OrderKind.MOVEMENT:
        return [f"{unit} H" for unit in legal.sites]
    return [f"{unit} D" for unit in legal.sites[: legal.picks]]


def uniform(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Samples uniformly: an order for each unit, or an allowed subset of sites to build on or disband."""
    smallest = 0 if legal.kind is OrderKind.BUILD else legal.picks
    sizes = range(smallest, legal.picks + 1)
    size = rng.choices(sizes, [comb(len(legal.sites), size) for size in sizes])[0]
    return _order_some(legal, size, rng)


def mover(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Mostly moves, retreats if possible, and builds as much as allowed."""
    if legal.kind is OrderKind.MOVEMENT:
        return [_move_or_any(options, rng) for options in legal.options]
    if legal.kind is OrderKind.RETREAT:
        return [rng.choice(_with_third_word(options, "R") or options) for options in legal.options]
    return _order_some(legal, legal.picks, rng)


def territorial(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Sends one unit to each reachable centre that its power does not own, and keeps it there; other units move at random."""
    owned = set(_require_board(board, "territorial").centres()[legal.power])
    wanted = geography().centres - owned
    if legal.kind is OrderKind.MOVEMENT:
        return _territorial_moves(legal, rng, wanted)
    if legal.kind is OrderKind.RETREAT:
        retreats = [_with_third_word(options, "R") for options in legal.options]
        gains = [[order for order in orders if province(order.split()[3]) in wanted] for orders in retreats]
        choices = zip(gains, retreats, legal.options, strict=True)
        return [rng.choice(gaining or retreating or options) for gaining, retreating, options in choices]
    if legal.kind is OrderKind.BUILD:
        return _order_some(legal, legal.picks, rng)
    idle = [site for site, unit in enumerate(legal.sites) if province(unit[2:]) not in wanted]
    busy = [site for site in range(len(legal.sites)) if site not in idle]
    chosen = (rng.sample(idle, len(idle)) + rng.sample(busy, len(busy)))[: legal.picks]
    return [rng.choice(legal.options[site]) for site in sorted(chosen)]


def dumbbot(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Scores every province and sends each unit to one of the best in reach; see `entente.game.dumbbot`."""
    from entente.game.dumbbot import dumbbot as choose_orders  # imported here because it loads numpy

    return choose_orders(legal, rng, _require_board(board, "dumbbot"))


def repeat(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Repeats each unit's order from the last movement phase if it is legal again; otherwise plays like `hold`."""
    last = _require_board(board, "repeat").last_orders.get(legal.power, ())
    return list(legal.completed(last) or hold(legal, rng, board))


PLAYERS: Mapping[str, Player] = {
    "hold": hold,
    "repeat": repeat,
    "random": uniform,
    "mover": mover,
    "territorial": territorial,
    "dumbbot": dumbbot,
}


def looks_back(name: str) -> bool:
    """Whether this player may read `Board.last_orders`, so that its orders depend on more than the position."""
    return name == "repeat" or name not in PLAYERS


@cache
def player(name: str) -> Player:
    """A built-in player, or a function named as `module:attribute`."""
    check_named("scripted player", name, PLAYERS)
    return PLAYERS[name] if name in PLAYERS else load_part("scripted player", name, _accept)


def check_player(name: str) -> None:
    player(name)


def is_player(name: str) -> bool:
    """Whether `name` is a built-in player, or has the form `module:attribute`."""
    try:
        check_named("scripted player", name, PLAYERS)
    except InputError:
        return False
    return True


def _accept(function: Player, named: str) -> Player:
    """Wrap a user's player in a check of its orders, so that no illegal order reaches the board."""
    if not callable(function):
        raise Misfit("it is not callable")
    check_arguments(function, "legal", "rng", "board")

    def order(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
        try:
            orders = list(function(legal, rng, board))
        except Exception as error:
            raise InputError(f"the {named} failed for {legal.power} ({type(error).__name__}: {error}): fix it") from error
        if not legal.admits(orders):
            raise InputError(
                f"the {named} ordered {orders} for {legal.power}, which is not a legal {legal.kind} set in site order: fix it"
            )
        return orders

    return order


def _require_board(board: "Board | None", name: str) -> "Board":
    if board is None:
        raise InputError(f"Player {name!r} needs the board, which is not available here: choose 'random' or 'mover'.")
    return board


def _territorial_moves(legal: LegalOrders, rng: random.Random, wanted: frozenset[str]) -> list[str]:
    orders: dict[int, str] = {}
    untaken = set(wanted)
    for site, unit in enumerate(legal.sites):
        if (here := province(unit[2:])) in untaken:
            orders[site] = f"{unit} H"
            untaken.discard(here)
    for site in rng.sample(range(len(legal.sites)), len(legal.sites)):
        if site in orders:
            continue
        goals = {order: province(order.split()[3]) for order in _with_third_word(legal.options[site], "-")}
        gains = [order for order, goal in goals.items() if goal in untaken]
        # The other units avoid these centres: a second move to one would bounce with the first.
        others = [order for order in legal.options[site] if goals.get(order) not in wanted]
        orders[site] = rng.choice(gains) if gains else _move_or_any(others, rng)
        if gains:
            untaken.discard(province(orders[site].split()[3]))
    return [orders[site] for site in range(len(legal.sites))]


def _order_some(legal: LegalOrders, size: int, rng: random.Random) -> list[str]:
    chosen = sorted(rng.sample(range(len(legal.sites)), size))
    return [rng.choice(legal.options[site]) for site in chosen] + [WAIVE] * (legal.picks - size)


def _move_or_any(options: Sequence[str], rng: random.Random) -> str:
    moves = _with_third_word(options, "-") if rng.random() < MOVE_SHARE else []
    return rng.choice(moves or options)


def _with_third_word(options: Sequence[str], word: str) -> list[str]:
    # The third word distinguishes a move from the support of a move: "A PAR - BUR", but "A PAR S A MAR - BUR".
    return [option for option in options if option.split(" ", 3)[2] == word]
