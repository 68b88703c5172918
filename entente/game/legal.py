"""The legal orders of one power in one phase, as plain data.

`LegalOrders` holds the sites of a power, the legal order texts of each site, and the number of builds or disbands. Lists of
legal orders do not define a legal set of orders, because a power often has more sites than builds. `count` and `admits` define
exactly which sets are legal. Everything is sorted, because the engine lists orders in an order that depends on the hash seed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

WAIVE = "WAIVE"
"""A build that the power declines; it belongs to no site."""


class OrderKind(StrEnum):
    MOVEMENT = "movement"
    RETREAT = "retreat"
    BUILD = "build"
    DISBAND = "disband"


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalOrders:
    power: str
    kind: OrderKind
    """Movement and retreat take one order for every site; build and disband take orders for some of the sites."""
    sites: tuple[str, ...]
    """Sorted by location: units ("A PAR"), dislodged units in a retreat, or centres to build in ("PAR")."""
    options: tuple[tuple[str, ...], ...]
    """Legal order texts per site, sorted; at least one each, never WAIVE."""
    picks: int
    """Orders in a set: the number of sites, of disbands owed, or of builds allowed (each of which may be waived)."""

    @property
    def is_forced(self) -> bool:
        return self.count() == 1

    def only_orders(self) -> tuple[str, ...]:
        if self.kind is OrderKind.BUILD:
            return (WAIVE,) * self.picks
        return tuple(options[0] for options in self.options[: self.picks])

    def count(self) -> int:
        if self.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
            return prod(len(options) for options in self.options)
        # by_size[k]: number of ways to order exactly k of the sites seen so far (elementary symmetric polynomials).
        by_size = [1] + [0] * self.picks
        for options in self.options:
            for size in range(self.picks, 0, -1):
                by_size[size] += by_size[size - 1] * len(options)
        return sum(by_size) if self.kind is OrderKind.BUILD else by_size[self.picks]

    def admits(self, orders: Sequence[str]) -> bool:
        """True for a legal set in canonical form: orders follow the order of the sites, and waives come last."""
        if len(orders) != self.picks:
            return False
        if self.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
            return all(order in options for order, options in zip(orders, self.options, strict=True))
        listed = list(orders)
        while self.kind is OrderKind.BUILD and listed and listed[-1] == WAIVE:
            listed.pop()
        # All orders consume one iterator, so sites must be in rising order and cannot repeat.
        open_sites = iter(self.options)
        return all(any(order in options for options in open_sites) for order in listed)

    def completed(self, orders: Sequence[str]) -> tuple[str, ...] | None:
        """The canonical order set with what the rules add: holds, disbands of dislodged units, waived builds. The first order for
        a site counts; illegal ones are ignored. None if `orders` names too few disbands."""
        by_site = [next((order for order in orders if order in options), None) for options in self.options]
        if self.kind is OrderKind.MOVEMENT:
            return tuple(order or f"{unit} H" for order, unit in zip(by_site, self.sites, strict=True))
        if self.kind is OrderKind.RETREAT:
            return tuple(order or f"{unit} D" for order, unit in zip(by_site, self.sites, strict=True))
        chosen = tuple(order for order in by_site if order is not None)
        if self.kind is OrderKind.BUILD:
            return chosen + (WAIVE,) * (self.picks - len(chosen))
        return chosen if len(chosen) == self.picks else None


def canonical_options(orders: Iterable[str]) -> tuple[str, ...]:
    """Legal orders of one site, sorted, without WAIVE. Of two spellings of one order ("A MAR S F MAO - SPA/NC" and "... - SPA")
    the shorter stays: two would split the policy's probability."""
    listed = set(orders)
    listed.discard(WAIVE)
    # Few orders end with a coast, so this is checked first.
    listed -= {order for order in listed if order[-3:-2] == "/" and " S " in order and " - " in order and order[:-3] in listed}
    return tuple(sorted(listed))
