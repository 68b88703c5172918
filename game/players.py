"""Scripted players: from the legal orders of one power and a random source to one legal set of orders.

Owns the table of our players by name; installed packages may bring others. Every set that a player returns is legal and canonical
(`LegalOrders.admits`), and depends on nothing but its arguments: the same legal orders, the same state of the
random source and the same board give the same orders anywhere.
"""

import random
from collections.abc import Mapping, Sequence
from math import comb
from typing import TYPE_CHECKING, Protocol

from game.geography import geography, province
from game.legal import WAIVE, LegalOrders, OrderKind
from telemetry.errors import InputError
from telemetry.extensions import BOTS, Extension, Misfit, Registry, check_arguments

if TYPE_CHECKING:  # Only for its type: naming a player loads no engine.
    from game.board import Board


class Player(Protocol):
    """Anything that orders for one power; `board` is the position the legal orders are of, and only looked at."""

    def __call__(self, legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]: ...


MOVE_SHARE = 0.7
"""Chance that the mover moves a unit that can: enough to take centres, and some supports are left."""


def hold(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Holds everywhere, disbands what is dislodged, builds nothing, disbands the first units owed."""
    if legal.kind is OrderKind.BUILD:
        return [WAIVE] * legal.picks
    if legal.kind is OrderKind.MOVEMENT:
        return [f"{unit} H" for unit in legal.sites]
    return [f"{unit} D" for unit in legal.sites[: legal.picks]]


def uniform(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Any of a site's orders, and any allowed subset of sites to build on or disband, with equal chance."""
    smallest = 0 if legal.kind is OrderKind.BUILD else legal.picks
    sizes = range(smallest, legal.picks + 1)
    size = rng.choices(sizes, [comb(len(legal.sites), size) for size in sizes])[0]
    return _order_some(legal, size, rng)


def mover(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Mostly moves, retreats where it can, builds all it may."""
    if legal.kind is OrderKind.MOVEMENT:
        return [_move_or_any(options, rng) for options in legal.options]
    if legal.kind is OrderKind.RETREAT:
        return [rng.choice(_with_third_word(options, "R") or options) for options in legal.options]
    return _order_some(legal, legal.picks, rng)


def territorial(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Goes for centres that its power does not own now, one unit each, and stays on them; moves anywhere otherwise."""
    owned = set(_need(board, "territorial").centres()[legal.power])
    wanted = geography().centres - owned
    if legal.kind is OrderKind.MOVEMENT:
        return _territorial_moves(legal, rng, wanted)
    if legal.kind is OrderKind.RETREAT:
        retreats = [_with_third_word(options, "R") for options in legal.options]
        gains = [[order for order in orders if province(order.split()[3]) in wanted] for orders in retreats]
        return [rng.choice(best or some or options) for best, some, options in zip(gains, retreats, legal.options, strict=True)]
    if legal.kind is OrderKind.BUILD:
        return _order_some(legal, legal.picks, rng)
    idle = [site for site, unit in enumerate(legal.sites) if province(unit[2:]) not in wanted]
    busy = [site for site in range(len(legal.sites)) if site not in idle]
    chosen = (rng.sample(idle, len(idle)) + rng.sample(busy, len(busy)))[: legal.picks]
    return [rng.choice(legal.options[site]) for site in sorted(chosen)]


def dumbbot(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
    """Values every place on the board and sends each unit to the best in its reach; see `game.dumbbot`."""
    from game.dumbbot import dumbbot as weigh_and_order  # brings numpy: whoever only names a player need not load it

    return weigh_and_order(legal, rng, _need(board, "dumbbot"))


PLAYERS: Mapping[str, Player] = {
    "hold": hold,
    "random": uniform,
    "mover": mover,
    "territorial": territorial,
    "dumbbot": dumbbot,
}


def player(name: str) -> Player:
    """The player of that name, ours or one that an installed package brings (docs/extending.md).

    Raises:
        InputError: there is none, or the one of a package cannot be used.
    """
    return _REGISTRY.get(name)


def check_player(name: str) -> None:
    """Refuse a name that no player bears, or that one of ours and one of a package bear both; the player is loaded.

    Raises:
        InputError: names the package, if there is one, and the cure.
    """
    _REGISTRY.check(name)
    player(name)


def player_names() -> list[str]:
    """Names of all players: ours, then those that installed packages bring."""
    return _REGISTRY.names()


def _accept(found: Player, extension: Extension) -> Player:
    """A player of a package. Its orders are checked each time, so that none reaches the board that is not legal."""
    if extension.name in _TAKEN:
        raise Misfit(f"has the name of {_TAKEN[extension.name]}")
    if not callable(found):
        raise Misfit("is no function that orders for a power")
    check_arguments(found, "legal", "rng", "board")

    def order(legal: LegalOrders, rng: random.Random, board: "Board | None" = None) -> list[str]:
        try:
            orders = list(found(legal, rng, board))
        except Exception as error:
            raise InputError(
                f"the {extension.text} failed for {legal.power} ({type(error).__name__}: {error}): mend that package"
            ) from error
        if not legal.admits(orders):
            raise InputError(
                f"the {extension.text} ordered {orders} for {legal.power}, which is no legal {legal.kind} set in the order of "
                "the sites: mend that package"
            )
        return orders

    return order


_TAKEN = {"policy": "the seat that is trained", "base": "a policy version", "newest": "a policy version"}
_REGISTRY: Registry[Player] = Registry(BOTS, PLAYERS, _accept)


def _need(board: "Board | None", name: str) -> "Board":
    if board is None:
        raise InputError(f"Player {name!r} looks at the board and was given none: choose 'random' or 'mover' here.")
    return board


def _territorial_moves(legal: LegalOrders, rng: random.Random, wanted: frozenset[str]) -> list[str]:
    orders: dict[int, str] = {}
    left = set(wanted)
    for site, unit in enumerate(legal.sites):
        if (here := province(unit[2:])) in left:
            orders[site] = f"{unit} H"
            left.discard(here)
    for site in rng.sample(range(len(legal.sites)), len(legal.sites)):
        if site in orders:
            continue
        aims = {order: province(order.split()[3]) for order in _with_third_word(legal.options[site], "-")}
        gains = [order for order, aim in aims.items() if aim in left]
        # Who comes too late keeps out of the way: a second move to the same centre would bounce with the first.
        others = [order for order in legal.options[site] if aims.get(order) not in wanted]
        orders[site] = rng.choice(gains) if gains else _move_or_any(others, rng)
        if gains:
            left.discard(province(orders[site].split()[3]))
    return [orders[site] for site in range(len(legal.sites))]


def _order_some(legal: LegalOrders, size: int, rng: random.Random) -> list[str]:
    """Random orders for `size` random sites, in the order of the sites; builds left over are waived."""
    chosen = sorted(rng.sample(range(len(legal.sites)), size))
    return [rng.choice(legal.options[site]) for site in chosen] + [WAIVE] * (legal.picks - size)


def _move_or_any(options: Sequence[str], rng: random.Random) -> str:
    moves = _with_third_word(options, "-") if rng.random() < MOVE_SHARE else []
    return rng.choice(moves or options)


def _with_third_word(options: Sequence[str], word: str) -> list[str]:
    # The third word tells a move from the support of one: "A PAR - BUR", but "A PAR S A MAR - BUR".
    return [option for option in options if option.split(" ", 3)[2] == word]
