"""Exhaustive proof of tactical positions, by the criterion in `evaluation.tactics`: every order set against every reply."""

import itertools
from collections.abc import Iterator, Sequence

from evaluation.tactics import TacticalPosition
from game.board import POWERS, Board
from game.legal import WAIVE, LegalOrders, OrderKind


def order_sets(legal: LegalOrders) -> Iterator[tuple[str, ...]]:
    """Every legal set of orders of one power, in canonical form."""
    if legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
        yield from itertools.product(*legal.options)
        return
    sizes = range(legal.picks + 1) if legal.kind is OrderKind.BUILD else (legal.picks,)
    for size in sizes:
        for sites in itertools.combinations(legal.options, size):
            for orders in itertools.product(*sites):
                yield orders + (WAIVE,) * (legal.picks - size)


def value(board: Board, power: str) -> int:
    """Centres that `power` would own if the year ended now."""
    occupants = {unit[2:5]: owner for owner, units in board.units().items() for unit in units}
    centres = board.centres()
    all_centres = {centre for own in centres.values() for centre in own} | set(board.free_centres())
    owned = set(centres[power])
    return sum(occupants.get(centre, power if centre in owned else "") == power for centre in all_centres)


def worth(
    board: Board, position: TacticalPosition, orders: Sequence[str], *, enough: int = -1, killers: list | None = None
) -> int:
    """Smallest value of an order set over all replies.

    Args:
        enough: the search stops once the worth is known to be at most this; the result is then an upper bound.
        killers: replies that refuted other order sets; they are tried first, and the list is updated.
    """
    return _worth(board, position, tuple(orders), position.phases, enough, [] if killers is None else killers)


def _worth(board: Board, position: TacticalPosition, orders: Sequence[str], phases: int, enough: int, killers: list) -> int:
    least = len(POWERS) * 34
    for reply in _replies(board, position, killers):
        after = board.fork()
        after.step({position.power: list(orders), **reply})
        least = min(least, _after(after, position, phases - 1, least))
        if least <= enough:
            if reply in killers:
                killers.remove(reply)
            killers.insert(0, reply)
            return least
    return least


def _after(board: Board, position: TacticalPosition, phases: int, most: int) -> int:
    """The value `phases` later with best play of both sides; a value above `most` may be returned as `most` or more."""
    while phases and not board.is_over and board.phase_type != "M":
        board.step({})
    if not phases or board.is_over:
        return value(board, position.power)
    legal, best, killers = board.legal_orders().get(position.power), -1, []
    for orders in order_sets(legal) if legal is not None else [()]:
        best = max(best, _worth(board, position, orders, phases, best, killers))
        if best >= most:
            break
    return best


def _replies(board: Board, position: TacticalPosition, killers: Sequence[dict]) -> Iterator[dict[str, list[str]]]:
    yield from list(killers)
    legal = {power: choice for power, choice in board.legal_orders().items() if power in position.opponents}
    own = [
        [orders for orders in order_sets(choice) if position.supported or not any(" S " in order for order in orders)]
        for choice in legal.values()
    ]
    for joint in itertools.product(*own):
        yield {power: list(orders) for power, orders in zip(legal, joint, strict=True)}


def prove(position: TacticalPosition) -> tuple[int, list[tuple[str, ...]]]:
    """The largest worth and all order sets that have it, by trying every order set against every reply."""
    board = Board.restore(position.snapshot)
    legal = board.legal_orders()[position.power]
    largest, best, killers = -1, [], []
    # The claimed best order sets come first, so the others need only one refuting reply.
    claimed = [orders for orders in position.best if legal.admits(orders)]
    for orders in [*claimed, *(orders for orders in order_sets(legal) if orders not in claimed)]:
        found = worth(board, position, orders, enough=largest - 1, killers=killers)
        if found > largest:
            largest, best = found, []
        if found == largest:
            best.append(orders)
    return largest, best
