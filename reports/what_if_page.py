"""Writes the answer to a what-if question as one HTML file without scripts, network access or other files;"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.intervals import format_interval
from evaluation.what_if import OrderSets, WhatIf
from game.board import Board
from game.render import draw_board
from game.scores import horizon_reached
from game.snapshot import POWERS, make_snapshot
from reports import sentences
from reports.write_page import page_template, write_page
from rollouts.fork import PlayedPly


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPhase:
    """A phase of the most telling pair."""

    phase: str
    orders: tuple[OrderSets | None, OrderSets | None]
    """With the orders that were played, and with the others; None if that fork skipped the phase."""
    boards: tuple[Board | None, Board | None]

    @property
    def differing(self) -> tuple[str, ...]:
        """Powers that ordered otherwise, or in one fork only."""
        played, changed = (orders or {} for orders in self.orders)
        return tuple(power for power in POWERS if played.get(power) != changed.get(power))


def telling_phases(found: WhatIf) -> list[ShownPhase]:
    """The phases of the most telling pair, in the order of play."""
    sides = [{ply.phase: ply for ply in fork.plies} for fork in (found.telling.played, found.telling.changed)]
    phases = list(sides[0])
    for phase in sides[1]:
        if phase not in sides[0]:
            later = [place for place, other in enumerate(phases) if horizon_reached(phase, other, 0)]
            phases.insert(later[0] if later else len(phases), phase)
    pairs = [(phase, sides[0].get(phase), sides[1].get(phase)) for phase in phases]
    return [
        ShownPhase(
            phase=phase,
            orders=(played and played.orders, changed and changed.orders),
            boards=(played and _board(played), changed and _board(changed)),
        )
        for phase, played, changed in pairs
    ]


def centre_rows(found: WhatIf) -> list[tuple[str, str, str, str, str]]:
    """Power, centres at the end with both orders, difference, its interval; the asked power first."""
    rows = []
    for power in (found.power, *(each for each in POWERS if each != found.power)):
        (played, changed), difference = found.centres(power), found.difference_of(power)
        shown = f"{played.mean:.2f}", f"{changed.mean:.2f}", f"{difference.mean:+.2f}"
        rows.append((power.title(), *shown, format_interval(difference.interval, "+.2f")))
    return rows


def write_what_if(found: WhatIf, change: str, command: str, file: Path) -> None:
    """Write the page to `file`.

    Args:
        change: what differs, in words.
        command: asks the same question again.
    """
    template = page_template("what_if.html.jinja")
    page = template.render(
        game=found.position.game,
        phase=found.position.board.long_phase.title(),
        change=change,
        verdict=sentences.what_if_verdict(found),
        players=", ".join(found.how.players),
        years=found.how.years,
        rows=centre_rows(found),
        spread=found.spread,
        power=found.power.title(),
        telling=sentences.telling_sentence(found),
        phases=[_drawn(shown) for shown in telling_phases(found)],
        commands=[("The same question again", command)],
    )
    write_page(file, page)


def _board(ply: PlayedPly) -> Board:
    return Board.restore(make_snapshot(ply.position, ply.phase, source="what-if", game_id="", seed=0))


def _drawn(shown: ShownPhase) -> dict[str, object]:
    sides = zip(("as played", "what if"), shown.boards, shown.orders, strict=True)
    return {
        "phase": shown.phase,
        "sides": [(side, None if board is None else draw_board(board, orders)) for side, board, orders in sides],
        "differing": [(power.title(), [_texts(orders, power) for orders in shown.orders]) for power in shown.differing],
    }


def _texts(orders: OrderSets | None, power: str) -> Sequence[str]:
    return orders.get(power, ()) if orders else ()
