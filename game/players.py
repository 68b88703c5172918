"""Scripted players: from the legal orders of one power and a random source to one legal set of orders.

Owns the table of players by name. Every set that a player returns is legal and canonical
(`LegalOrders.admits`), and depends on nothing but its two arguments: the same legal orders and the same state
of the random source give the same orders anywhere.
"""

import random
from collections.abc import Callable, Sequence
from math import comb

from game.legal import WAIVE, LegalOrders, OrderKind
from telemetry.errors import InputError

Player = Callable[[LegalOrders, random.Random], list[str]]

MOVE_SHARE = 0.7
"""Chance that the mover moves a unit that can: enough to take centres, and some supports are left."""


def hold(legal: LegalOrders, rng: random.Random) -> list[str]:
    """Holds everywhere, disbands what is dislodged, builds nothing, disbands the first units owed."""
    if legal.kind is OrderKind.BUILD:
        return [WAIVE] * legal.picks
    if legal.kind is OrderKind.MOVEMENT:
        return [f"{unit} H" for unit in legal.sites]
    return [f"{unit} D" for unit in legal.sites[: legal.picks]]


def uniform(legal: LegalOrders, rng: random.Random) -> list[str]:
    """Any of a site's orders, and any allowed subset of sites to build on or disband, with equal chance."""
    smallest = 0 if legal.kind is OrderKind.BUILD else legal.picks
    sizes = range(smallest, legal.picks + 1)
    size = rng.choices(sizes, [comb(len(legal.sites), size) for size in sizes])[0]
    return _order_some(legal, size, rng)


def mover(legal: LegalOrders, rng: random.Random) -> list[str]:
    """Mostly moves, retreats where it can, builds all it may."""
    if legal.kind is OrderKind.MOVEMENT:
        return [_move_or_any(options, rng) for options in legal.options]
    if legal.kind is OrderKind.RETREAT:
        return [rng.choice(_with_third_word(options, "R") or options) for options in legal.options]
    return _order_some(legal, legal.picks, rng)


PLAYERS: dict[str, Player] = {"hold": hold, "random": uniform, "mover": mover}


def player(name: str) -> Player:
    """The player of that name.

    Raises:
        InputError: there is none.
    """
    if name not in PLAYERS:
        raise InputError(f"There is no scripted player {name!r}. Known players: {', '.join(PLAYERS)}.")
    return PLAYERS[name]


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
