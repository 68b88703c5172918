"""Order sets near another one: one order changed, or two that work together. Search tries them after its proposals.

A proposer that looks at each unit alone, as DumbBot does, seldom orders a move together with its support. A changed support here
always fits the rest of the set: it supports an ordered move or hold, so few changes are wasted.
"""

import random
from collections.abc import Iterator, Sequence

from entente.game.legal import LegalOrders, OrderKind
from entente.game.scripted import player

ADJUSTMENTS = 40
"""Samples of builds or disbands, which have few different sets."""


def changed_orders(legal: LegalOrders, orders: Sequence[str], rng: random.Random) -> list[tuple[str, ...]]:
    """Distinct legal order sets near the canonical set `orders`, without that set, in random order."""
    ordered = tuple(orders)
    if legal.kind is OrderKind.MOVEMENT:
        changes = list(dict.fromkeys(_movements(legal, ordered)))
    elif legal.kind is OrderKind.RETREAT:
        changes = [_with(ordered, {site: order}) for site, options in enumerate(legal.options) for order in options]
    else:
        changes = list(dict.fromkeys(tuple(player("random")(legal, rng)) for _ in range(ADJUSTMENTS)))
    changes = [orders for orders in changes if orders != ordered]
    rng.shuffle(changes)
    return changes


def _movements(legal: LegalOrders, orders: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Each unit's moves and hold, alone and with a support by another unit, and its supports of ordered moves and holds."""
    supports = [_supports(options) for options in legal.options]
    for site, options in enumerate(legal.options):
        for order in options:
            if order.split(" ", 3)[2] not in ("-", "H"):
                continue
            yield _with(orders, {site: order})
            for other, by_what in enumerate(supports):
                if other != site and (support := by_what.get(_supported(order))):
                    yield _with(orders, {site: order, other: support})
        for other, order in enumerate(orders):
            if other != site and (support := supports[site].get(_supported(order))):
                yield _with(orders, {site: support})


def _supports(options: Sequence[str]) -> dict[str, str]:
    return {words[3]: order for order in options if (words := order.split(" ", 3))[2] == "S"}


def _supported(order: str) -> str:
    """What a support of the unit with this order names: its move without "VIA" and coast, or the unit alone if it stays."""
    words = order.split(" ")
    return " ".join((*words[:3], words[3][:3])) if words[2] == "-" else " ".join(words[:2])


def _with(orders: tuple[str, ...], changes: dict[int, str]) -> tuple[str, ...]:
    return tuple(changes.get(site, order) for site, order in enumerate(orders))
