"""Choice of the rules engine behind a board. Both choices give the same positions, results and legal orders; tests compare
them.
"""

from enum import StrEnum


class BoardPath(StrEnum):
    """How a board computes legal orders and plays a phase."""

    FAST = "fast"
    """Order tables, field-by-field copies and a shorter step. Uses private names of the pinned engine release."""
    PLAIN = "plain"
    """Public calls of the engine only: several times slower, and correct for any release."""
