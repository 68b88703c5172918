"""First decisions of two policies from the same positions, side by side.

The positions are the first ones that both scores hold, in stored order, so they are not selected by hand. Base and trained
version draw with the same seed, so a difference comes from the weights alone.
"""

import base64
import math
from dataclasses import dataclass

from decoding.thoughts import Thought
from evaluation.score_files import ScoreRecord
from evaluation.strength import Opening
from game.board import Board
from game.render import Frame, draw_board, frame_around, order_locations

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardView:
    """The orders of one policy in one position."""

    who: str
    """As "base" or "version 20"."""
    picture: str
    """SVG of the relevant part of the board, with the orders' arrows; the same part for every policy."""
    alt: str
    """The same as text."""
    orders: list[tuple[str, float]]
    """Each order with its probability, given the thought and the orders before it."""
    thought: Thought | None
    """What the policy wrote before the orders; None if it wrote nothing."""

    @property
    def joint(self) -> float:
        """Probability of the whole set."""
        return math.prod(probability for _, probability in self.orders)

    @property
    def uri(self) -> str:
        """The picture as a data URL, so that its ids and styles cannot collide with those of the page."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.picture.encode()).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One position with the orders of each policy."""

    phase: str
    """As "SPRING 1902 MOVEMENT"."""
    power: str
    """The power that decides."""
    centres: int
    """Supply centres it holds."""
    views: list[BoardView]
    """The policies, base first."""


def shown_positions(records: dict[str, ScoreRecord], shown: int = SHOWN) -> list[Position]:
    """The first positions of "base" and "trained", or of the one that exists."""
    players = [records[label] for label in ("base", "trained") if label in records]
    if not players:
        return []
    openings = [{(o.snapshot.snapshot_id, o.power): o for o in record.score.openings} for record in players]
    common = [key for key in openings[0] if all(key in held for held in openings)][:shown]
    return [_position([(_name(record), held[key]) for record, held in zip(players, openings, strict=True)]) for key in common]


def _name(record: ScoreRecord) -> str:
    return f"version {record.policy_version}" if record.policy_version else "base"


def _position(decided: list[tuple[str, Opening]]) -> Position:
    _, first = decided[0]
    board = Board.restore(first.snapshot)
    frame = frame_around(location for _, opening in decided for location in order_locations(board, first.power, opening.orders))
    views = [_view(board, who, opening, frame) for who, opening in decided]
    return Position(phase=board.long_phase, power=first.power, centres=len(board.centres()[first.power]), views=views)


def _view(board: Board, who: str, opening: Opening, frame: Frame) -> BoardView:
    orders = list(zip(opening.orders, opening.probabilities, strict=True))
    odds = ", ".join(f"{order} with probability {probability:.0%}" for order, probability in orders)
    return BoardView(
        who=who,
        picture=draw_board(board, {opening.power: opening.orders}, certainty=dict(orders), frame=frame),
        alt=f"Board of {board.long_phase.lower()} with the orders of {opening.power.title()} by the {who} policy: {odds}",
        orders=orders,
        thought=opening.thought,
    )
