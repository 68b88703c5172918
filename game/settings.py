"""Which of the two rules engines a board plays on.

Both give the same positions, results and legal orders; tests play them side by side.
"""

from enum import StrEnum


class BoardPath(StrEnum):
    """The way a board computes legal orders and plays a phase."""

    FAST = "fast"
    """Tables, forks by reference and a light step: private parts of the engine's pinned release."""
    PLAIN = "plain"
    """The engine's public calls only: several times slower, and right for any release of it."""
