"""A live game: its position, its legal orders, and one step at a time.

Other packages use the rules engine only through `Board`. Legal orders are computed once per phase and shared with forks. An
illegal order is rejected and counted. A restored or forked board continues exactly as the original would. Of its history a board
keeps only the orders of the last movement phase; callers that need more store each `PhaseResult`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from entente.game.adjudicator import Adjudicator, freeze, new_game, thaw
from entente.game.legal import WAIVE, LegalOrders, OrderKind, canonical_options
from entente.game.snapshot import (
    POWERS,
    Snapshot,
    last_orders_in,
    movement_orders_of,
    position_id,
    read_position,
    with_last_orders,
)
from entente.telemetry.errors import DataError, InputError

if TYPE_CHECKING:
    from entente.game.plain import PackageGame

__all__ = ["POWERS", "Board", "PhaseResult"]

OVER = "COMPLETED"
"""Phase name of a finished game: won, or drawn after a hundred years."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    phase: str
    """Short name of the phase, for example "S1903M"."""
    orders: dict[str, tuple[str, ...]]
    """Accepted orders per power in `step`'s argument, in the argument's order."""
    results: dict[str, tuple[str, ...]]
    """Result marks per unit, for example ("bounce",) or ("cut", "dislodged"); empty for an order that succeeded."""
    rejected: dict[str, int]
    """Per power in `step`'s argument: orders that are illegal, exceed the budget, or repeat a site."""
    owners: dict[str, str]
    """Power of each unit in `results`.

    A unit that was destroyed when it was dislodged is missing: the engine names it again in the retreat phase.
    """
    dislodged: dict[str, str]
    """Per dislodged unit, the power whose unit moved in; empty except after movement phases."""


class Board:
    """One game in progress. Make it with `start`, `restore` or `fork`."""

    __slots__ = ("_computed", "_game", "_last_orders", "_legal", "_phase", "_position", "_year")

    def __init__(self, game: "Adjudicator | PackageGame") -> None:
        """`game`: for tests and benchmarks also one of `entente/game/plain.py`."""
        self._game = game
        self._year = 0
        self._last_orders: dict[str, tuple[str, ...]] = {}  # replaced, never changed, so forks share it
        self._enter_phase()

    @classmethod
    def start(cls) -> "Board":
        return cls(new_game())

    @classmethod
    def restore(cls, snapshot: Snapshot) -> "Board":
        try:
            position = read_position(snapshot)
            board = cls(thaw(position))
            board._last_orders = last_orders_in(position)
            return board
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"Snapshot {snapshot.snapshot_id} ({snapshot.phase}) has no position of this version: "
                f"{error!r}. Build the state cache again."
            ) from error

    def fork(self) -> "Board":
        """An independent copy. Both share what is computed once per position: legal orders, text, results of `once`."""
        twin = Board(self._game.fork())
        twin._legal, twin._position, twin._year = self._legal, self._position, self._year
        twin._computed, twin._last_orders = self._computed, self._last_orders
        return twin

    def with_last_orders(self, orders: Mapping[str, Sequence[str]]) -> "Board":
        """A copy with these orders of the movement phase before it; raises an InputError if they are no movement orders."""
        twin = Board(self._game.fork())
        twin._legal, twin._year = self._legal, self._year
        try:
            twin._last_orders = movement_orders_of(orders)
        except ValueError as error:
            raise InputError(f"the last orders cannot be read: {error}") from error
        return twin

    def once(self, compute: "Callable[[Board], _T]") -> _T:
        """`compute(self)`, called once per position. Forks share the result, so callers must not change it."""
        if compute not in self._computed:
            self._computed[compute] = compute(self)
        return self._computed[compute]

    def prepare_forks(self) -> None:
        """Compute legal orders and the position's text now, so that all forks share them."""
        self.legal_orders()
        self._frozen()

    def release(self) -> None:
        """Break the reference cycle between the game and its powers: reference counting then frees its some 500 objects.

        The board cannot be stepped afterwards.
        """
        for power in self._game.powers.values():
            power.game = None

    def snapshot(self, *, game_id: str, seed: int, source: str) -> Snapshot:
        self._check_not_over("freeze")
        snapshot_id, position = self._frozen()
        return Snapshot(
            snapshot_id=snapshot_id,
            phase=self.phase,
            year=self.year,
            season=self.season,
            phase_type=self.phase_type,
            centres=self.centre_counts(),
            position=position,
            source=source,
            game_id=game_id,
            seed=seed,
        )

    @property
    def snapshot_id(self) -> str:
        """As that of a snapshot of this position."""
        return self._frozen()[0]

    @property
    def phase(self) -> str:
        """Short name, for example "S1903M"; "COMPLETED" if the game is over."""
        return self._phase

    @property
    def long_phase(self) -> str:
        return str(self._game.phase)

    @property
    def year(self) -> int:
        """Game year; the last year played if the game is over."""
        return self._year

    @property
    def season(self) -> str:
        """ "S", "F" or "W"; empty if the game is over."""
        return "" if self.is_over else self._phase[0]

    @property
    def phase_type(self) -> str:
        """ "M" movement, "R" retreats, "A" adjustments; empty if the game is over."""
        return "" if self.is_over else self._phase[-1]

    @property
    def is_over(self) -> bool:
        return self._phase == OVER

    def units(self) -> dict[str, tuple[str, ...]]:
        """Units on the map per power, sorted by location, without dislodged units."""
        return {power: tuple(sorted(self._game.powers[power].units, key=_location)) for power in POWERS}

    def is_alive(self, power: str) -> bool:
        own = self._game.powers[power]
        return bool(own.centers or own.units or own.retreats)

    def dislodged(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """Dislodged units per power, sorted by location, each with the locations that it may retreat to."""
        retreats = {power: self._game.powers[power].retreats for power in POWERS}
        return {power: {unit: tuple(sorted(own[unit])) for unit in sorted(own, key=_location)} for power, own in retreats.items()}

    def centres(self) -> dict[str, tuple[str, ...]]:
        """Supply centres owned per power, sorted."""
        return {power: tuple(sorted(self._game.powers[power].centers)) for power in POWERS}

    def influence(self) -> dict[str, tuple[str, ...]]:
        """Provinces per power that its units entered last, sorted."""
        return {power: tuple(sorted(self._game.powers[power].influence)) for power in POWERS}

    def free_centres(self) -> tuple[str, ...]:
        owned = {centre for power in POWERS for centre in self._game.powers[power].centers}
        return tuple(sorted(set(self._game.map.scs) - owned))

    def centre_counts(self) -> tuple[int, ...]:
        return tuple(len(self._game.powers[power].centers) for power in POWERS)

    def units_in_spring(self, power: str) -> int:
        """In adjustment phases the most units that the power can have after them; in other phases its units now."""
        own = self._game.powers[power]
        if self.phase_type != "A":
            return len(own.units)
        occupied = {unit[2:5] for each in self._game.powers.values() for unit in each.units}
        open_homes = sum(home in own.centers and home not in occupied for home in own.homes)
        return min(len(own.centers), len(own.units) + open_homes)

    @property
    def last_orders(self) -> dict[str, tuple[str, ...]]:
        """Orders of the last movement phase, one per unit, sorted as units are; a unit without an order has a hold.

        Retreats and adjustments do not replace them. Empty in a game's first phase, and for a position recorded without them.
        """
        return dict(self._last_orders)

    def legal_orders(self) -> dict[str, LegalOrders]:
        """Keyed by power; powers with nothing to order are missing."""
        if self._legal is None:
            possible = {} if self.is_over else self._game.get_all_possible_orders()
            by_power = {power: self._legal_of(power, possible) for power in POWERS} if possible else {}
            self._legal = {power: legal for power, legal in by_power.items() if legal is not None}
        return dict(self._legal)

    def parsed(self, power: str, order: str) -> str:
        """`order` in the spelling of the engine's parser; empty if the parser refuses it."""
        game = self._game.fork()
        try:
            game.set_orders(power, [order])
        except (LookupError, ValueError):  # of a text that is far from an order
            return ""
        return "".join(game.get_orders(power)[:1])

    def step(self, orders: Mapping[str, Sequence[str]]) -> PhaseResult:
        """Play this phase and continue to the next phase in which some power has orders to give.

        Units without an order hold, retreating units without an order disband, and missing disbands are chosen by the rules.

        Raises:
            InputError: the game is over, a power is unknown, or an order is not a text.
        """
        self._check_not_over("step")
        legal, taken, rejected = self.legal_orders(), {}, {}
        for power, listed in orders.items():
            _check_texts(power, listed)
            taken[power] = _acceptable(listed, legal.get(power))
            rejected[power] = len(listed) - len(taken[power])
        for power, accepted in taken.items():
            rejected[power] += self._game.take_orders(power, list(accepted))
        played, owners = self._phase, self._owners(taken)
        if played.endswith("M"):
            self._last_orders = {power: _with_holds(taken.get(power, ()), own) for power, own in legal.items()}
        results = self._game.adjudicate()
        dislodged = self._driven_out_by(results) if played.endswith("M") else {}
        self._enter_phase()
        return PhaseResult(
            phase=played,
            orders=taken,
            results=results,
            rejected=rejected,
            owners={unit: owners[unit] for unit in results if unit in owners},
            dislodged=dislodged,
        )

    def advance(self, orders: Mapping[str, Sequence[str]]) -> None:
        """Play this phase as `step` does, without its checks and without a record.

        The caller guarantees that `orders` are legal sets of all powers in `legal_orders`.
        """
        self._check_not_over("step")
        if self._phase.endswith("M"):
            self._last_orders = {power: tuple(orders[power]) for power in POWERS if power in orders}
        for power, own in orders.items():
            self._game.take_orders(power, list(own))
        self._game.adjudicate()
        self._enter_phase()

    def rules_position(self) -> str:
        """The position's text without `last_orders`, on which the rules do not depend."""
        return freeze(self._game)

    def _frozen(self) -> tuple[str, str]:
        if self._position is None:
            position = freeze(self._game)
            self._position = position_id(position), with_last_orders(position, self._last_orders)
        return self._position

    def _owners(self, taken: Mapping[str, Sequence[str]]) -> dict[str, str]:
        powers = self._game.powers
        if self.phase_type == "R":
            return {unit: power for power in POWERS for unit in powers[power].retreats}
        owners = {unit: power for power in POWERS for unit in powers[power].units}
        if self.phase_type == "A":  # units to be built have no entry yet
            owners |= {_unit(order): power for power, own in taken.items() for order in own if order != WAIVE}
        return owners

    def _driven_out_by(self, results: Mapping[str, Sequence[str]]) -> dict[str, str]:
        dislodged = [unit for unit, marks in results.items() if "dislodged" in marks]
        if not dislodged:
            return {}
        occupants = {unit[2:5]: power for power in POWERS for unit in self._game.powers[power].units}
        return {unit: occupants[unit[2:5]] for unit in dislodged}

    def _enter_phase(self) -> None:
        self._phase = str(self._game.get_current_phase())
        self._legal: dict[str, LegalOrders] | None = None
        self._position: tuple[str, str] | None = None
        self._computed: dict[Callable[[Board], Any], Any] = {}
        if not self.is_over:
            self._year = int(self._phase[1:-1])

    def _check_not_over(self, verb: str) -> None:
        if self.is_over:
            raise InputError(f"Cannot {verb} a game that is over (last year {self._year}). Check `is_over` first.")

    def _legal_of(self, name: str, possible: Mapping[str, Sequence[str]]) -> LegalOrders | None:
        # Use the orderable locations, not power.units: the unit that dislodged another would get that unit's retreats.
        locations = self._game.get_orderable_locations(name)
        if not locations:
            return None
        power = self._game.powers[name]
        kind, picks, sites = OrderKind.MOVEMENT, len(locations), power.units
        if self.phase_type == "R":
            kind, sites = OrderKind.RETREAT, power.retreats
        elif self.phase_type == "A":
            surplus = len(power.centers) - len(power.units)
            kind, sites = (OrderKind.BUILD, locations) if surplus > 0 else (OrderKind.DISBAND, power.units)
            picks = min(abs(surplus), len(locations))
        return LegalOrders(
            power=name,
            kind=kind,
            sites=tuple(sites if kind is OrderKind.BUILD else sorted(sites, key=_location)),
            options=tuple(canonical_options(possible[location]) for location in locations),
            picks=picks,
        )


def _location(unit: str) -> str:
    return unit[2:]


def _unit(order: str) -> str:
    return " ".join(order.split(" ", 2)[:2])


def _with_holds(taken: Sequence[str], legal: LegalOrders) -> tuple[str, ...]:
    if len(taken) == legal.picks and all(map(str.startswith, taken, legal.sites)):
        return tuple(taken)  # as nearly always
    return legal.completed(taken) or ()


def _check_texts(power: str, orders: Sequence[str]) -> None:
    if power not in POWERS:
        raise InputError(f"There is no power {power!r}. The powers are {', '.join(POWERS)}.")
    if isinstance(orders, str) or not isinstance(orders, Sequence) or not all(isinstance(order, str) for order in orders):
        raise InputError(f"The orders of {power} must be a list of texts such as 'A PAR - BUR', not {orders!r}.")


def _acceptable(orders: Sequence[str], legal: LegalOrders | None) -> tuple[str, ...]:
    """The orders that are legal together, in their order: one per site, within the budget."""
    if legal is None:
        return ()
    site_of = {order: site for site, options in enumerate(legal.options) for order in options}
    taken: list[str] = []
    used: set[int] = set()
    for order in orders:
        site = site_of.get(order)
        is_waive = order == WAIVE and legal.kind is OrderKind.BUILD
        if len(taken) < legal.picks and (is_waive or (site is not None and site not in used)):
            taken.append(order)
            if site is not None:
                used.add(site)
    return tuple(taken)
