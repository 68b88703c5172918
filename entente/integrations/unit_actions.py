"""One power's orders as a sequence of actions, one per site, with masks that keep the order set legal.

An action is an index into one fixed list for all positions; its text is the order without the unit ("BUR", "S MAR BUR")."""

from collections.abc import Sequence
from functools import lru_cache

from entente.game.geography import geography, province
from entente.game.legal import LegalOrders, OrderKind

PASS = "PASS"
"""Builds nothing here, or keeps this unit."""
_BUILDS = {"A": "BUILD A", "F": "BUILD F", "F/NC": "BUILD F/NC", "F/SC": "BUILD F/SC"}


@lru_cache(maxsize=1)
def action_texts() -> tuple[str, ...]:
    reach = geography().reach
    locations = {location for _, location in reach}
    fleets = {province(location) for kind, location in reach if kind == "F"}
    coasts = sorted(fleets & {location for kind, location in reach if kind == "A"})
    convoys = {f"{start} {end}" for start in coasts for end in coasts if start != end}
    steps = {f"{start} {goal}" for (_, start), goals in reach.items() for end in goals for goal in (end, province(end))}
    texts = {"H", "D", PASS, *_BUILDS.values(), *locations, *(f"{coast} VIA" for coast in coasts)}
    texts |= {f"S {place}" for place in (*locations, *steps, *convoys)} | {f"C {pair}" for pair in convoys}
    return tuple(sorted(texts))


@lru_cache(maxsize=1)
def _numbers() -> dict[str, int]:
    return {text: number for number, text in enumerate(action_texts())}


@lru_cache(maxsize=1 << 16)  # there are about 13,000 orders
def action_of(order: str) -> int:
    """The action of an order; unique among the orders of one site."""
    unit, location, *action = order.split(" ")
    text = (
        _BUILDS[unit + location[3:]] if action == ["B"] else " ".join(word for word in action if word not in ("-", "A", "F", "R"))
    )
    return _numbers()[text]


class UnitChoices:
    """The order set of one power, built site by site. A site with only one legal action is skipped."""

    __slots__ = ("_actions", "_options", "legal", "orders", "site")

    def __init__(self, legal: LegalOrders) -> None:
        self.legal = legal
        self.site = 0
        """Index of the current site in `legal.sites`; its length when done."""
        self.orders: list[str] = []
        self._take_forced()

    @property
    def is_done(self) -> bool:
        """If so, `orders` is a legal set, except for waived builds."""
        return self.site == len(self.legal.sites)

    @property
    def actions(self) -> Sequence[int]:
        return self._actions

    def take(self, action: int) -> bool:
        """False, without effect, if `action` is not legal."""
        if action not in self._actions:
            return False
        self._take(self._actions.index(action))
        self._take_forced()
        return True

    def _take(self, place: int) -> None:
        if place < len(self._options):
            self.orders.append(self._options[place])
        self.site += 1

    def _take_forced(self) -> None:
        self._look()
        while len(self._actions) == 1:
            self._take(0)
            self._look()

    def _look(self) -> None:
        legal, left = self.legal, self.legal.picks - len(self.orders)
        if not left:
            self.site = len(legal.sites)
        self._options = () if self.is_done else legal.options[self.site]
        self._actions = [action_of(order) for order in self._options]
        may_pass = legal.kind is OrderKind.BUILD or (legal.kind is OrderKind.DISBAND and len(legal.sites) - self.site > left)
        if may_pass and not self.is_done:
            self._actions.append(_numbers()[PASS])
