"""The switches between the old way and the new one, one for each improvement.

OLD                         all of them as the old system had them
NEW                         all of them as Entente has them, in the same harness
OLD.with_new("packing")     one improvement on, alone
NEW.with_old("packing")     one improvement off, alone
"""

from dataclasses import dataclass, fields, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """True: as in Entente; False: as in the old system."""

    snapshots: bool
    """Forks start from frozen positions; else from a game whose first phases are played by inference for every rollout."""
    fast_board: bool
    """Positions are forked as plain data on the fast board; else the engine's public calls, and a pickled clone for each fork."""
    compact_prompts: bool
    """Short text from most shared to least shared; else indented JSON that names the power first."""
    prefix_cache: bool
    """The engine keeps prefixes; the old system had this on, so only its absence is measured."""
    mask_core: bool
    """One flat automaton for the batch; else a trie a request, walked and rebuilt in Python, a row at a time."""
    forced_jump: bool
    """Tokens that are the only legal ones are taken with the drawn one before them; else a pass each. It needs `mask_core`."""
    packing: bool
    """Shared prefixes once, legal rows of the head only, no reference forward; else two padded forwards, four rows at a time."""
    kept_tokens: bool
    """Rows carry the ids that were drawn; else the trainer tokenises prompt and answer again."""
    arrow: bool
    """Rows are published as one Arrow shard and found by the index; else an indented JSON file a rollout."""
    in_flight: bool
    """Forks go on independently; else in lock-step, one generate call a phase, which waits for its slowest answer."""
    warm_up_all: bool = True
    """In a warm-up the model plays every seat, as it did; else only the policy's, and scripted players the others."""

    def with_new(self, name: str) -> Self:
        """This way with one improvement on, and what it cannot be without."""
        return replace(self, **{name: True, **({"mask_core": True} if name == "forced_jump" else {})})

    def with_old(self, name: str) -> Self:
        """This way with one improvement off."""
        return replace(self, **{name: False})


_FIXED = ("prefix_cache", "warm_up_all")
IMPROVEMENTS = tuple(field.name for field in fields(Way) if field.name not in _FIXED)
"""Switches in which the two ways differ."""
NEW = Way(**dict.fromkeys(IMPROVEMENTS, True), prefix_cache=True)  # type: ignore[arg-type]
OLD = Way(**dict.fromkeys(IMPROVEMENTS, False), prefix_cache=True)  # type: ignore[arg-type]
