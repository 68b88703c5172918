"""Switches between the old way and the new one, one for each improvement.

OLD                         all as in the old system
NEW                         all as in Entente, in the same harness
OLD.with_new("packing")     one improvement alone
NEW.with_old("packing")     all improvements but one
"""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """True: as in Entente; False: as in the old system."""

    snapshots: bool
    """Forks start from frozen positions; else from a game whose first phases are played by inference."""
    fast_board: bool
    """Forks are plain data on the fast board; else pickled games of the engine's public calls."""
    compact_prompts: bool
    """Short text, most shared parts first; else indented JSON with the power first."""
    prefix_cache: bool
    """The engine caches prefixes. The old system did so too, so only its absence is measured."""
    mask_core: bool
    """One flat automaton for the batch; else a trie for each request, in Python, row by row."""
    forced_jump: bool
    """Forced tokens are taken together with the token before them; else one pass each. Needs `mask_core`."""
    packing: bool
    """Shared prefixes are computed once, the head only for legal rows; else padded forwards of four rows."""
    no_reference: bool
    """No divergence from the base in the loss; else it is there, and a forward of the base is computed for it."""
    kept_tokens: bool
    """Rows hold the drawn ids; else the trainer tokenises prompt and completion again."""
    arrow: bool
    """A step's rows are one Arrow shard, found by the index; else one indented JSON file for each rollout."""
    in_flight: bool
    """Forks advance independently; else in lock-step, with one generate call a phase."""
    warm_up_all: bool = True
    """In a warm-up the model plays every power; else only the policy's, and scripted players the others."""

    def with_new(self, name: str) -> Self:
        """This way with one improvement, and with the one it needs."""
        return replace(self, **{name: True, **({"mask_core": True} if name == "forced_jump" else {})})

    def with_old(self, name: str) -> Self:
        """This way without one improvement."""
        return replace(self, **{name: False})


_FIXED = ("prefix_cache", "warm_up_all")
IMPROVEMENTS = tuple(field.name for field in fields(Way) if field.name not in _FIXED)
"""Switches in which OLD and NEW differ."""
NEW = Way(**dict.fromkeys(IMPROVEMENTS, True), prefix_cache=True)  # type: ignore[arg-type]
OLD = Way(**dict.fromkeys(IMPROVEMENTS, False), prefix_cache=True)  # type: ignore[arg-type]
