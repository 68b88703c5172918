"""What one power may order in one phase, as plain data.

Owns `LegalOrders`: the sites of a power, the legal order texts of each, and the budget of builds and
disbands. The lists alone do not make a legal *set* of orders (a power mostly has more sites than builds), so
the rule of the set is kept here with them: `count` and `admits` say exactly which sets are legal. Everything
is sorted, because the engine lists orders in an order that changes with the hash seed. Never looks at a
board, never chooses an order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

WAIVE = "WAIVE"
"""A build that is not made; it belongs to no site."""


class OrderKind(StrEnum):
    """What a power is asked for in a phase."""

    MOVEMENT = "movement"
    RETREAT = "retreat"
    BUILD = "build"
    DISBAND = "disband"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalOrders:
    """Every legal order of one power in one phase, and how many of them make a set."""

    power: str
    """Name in capitals, as "FRANCE"."""
    kind: OrderKind
    """Movement and retreat take one order for each site; build and disband take `picks` of the sites."""
    sites: tuple[str, ...]
    """Sorted by location: units ("A PAR"), dislodged ones in a retreat, or centres to build in ("PAR")."""
    options: tuple[tuple[str, ...], ...]
    """Per site, its legal order texts, sorted; at least one, never WAIVE."""
    picks: int
    """Orders in a set: all the sites, so many disbands exactly, or so many builds, any of them waived."""

    @property
    def is_forced(self) -> bool:
        """True when exactly one set of orders is legal."""
        return self.count() == 1

    def count(self) -> int:
        """Number of legal sets of orders, exact."""
        if self.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
            return prod(len(options) for options in self.options)
        # by_size[k]: ways to order exactly k of the sites seen so far (elementary symmetric polynomials).
        by_size = [1] + [0] * self.picks
        for options in self.options:
            for size in range(self.picks, 0, -1):
                by_size[size] += by_size[size - 1] * len(options)
        return sum(by_size) if self.kind is OrderKind.BUILD else by_size[self.picks]

    def admits(self, orders: Sequence[str]) -> bool:
        """True for a legal set in canonical form: in the order of the sites, waives after the builds."""
        if len(orders) != self.picks:
            return False
        if self.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
            return all(order in options for order, options in zip(orders, self.options, strict=True))
        given = list(orders)
        while self.kind is OrderKind.BUILD and given and given[-1] == WAIVE:
            given.pop()
        # One iterator for all orders: a site is passed only once, so sites must rise and cannot repeat.
        open_sites = iter(self.options)
        return all(any(order in options for options in open_sites) for order in given)


def canonical_options(orders: Iterable[str]) -> tuple[str, ...]:
    """Sorted legal orders of one site: no WAIVE, and a support of a move names the province, not its coast.

    The engine lists "A MAR S F MAO - SPA/NC" and "A MAR S F MAO - SPA"; both support the same move, whichever
    coast it takes, so the longer spelling would only split the policy's probability between two names of one
    order.
    """
    listed = set(orders)
    return tuple(sorted(order for order in listed if order != WAIVE and not _is_longer_spelling(order, listed)))


def _is_longer_spelling(order: str, listed: set[str]) -> bool:
    return " S " in order and order[-3:-2] == "/" and " - " in order and order[:-3] in listed
