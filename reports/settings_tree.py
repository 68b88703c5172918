"""A run's settings as flat names, and their differences from a preset. Pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OF_EVERY_RUN = ("run", "runs_root")  # different in every run, so not compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run's settings compared with the closest preset."""

    preset: str
    """The preset with the fewest differences."""
    differences: list[tuple[str, Any, Any]]
    """Dotted name, the run's value, the preset's value."""


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value, in the tree's order."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def compare(settings: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> Comparison:
    """The closest of `presets` (the first if several are) and the differences. A name on one side only is a difference."""
    ours = flat(settings)
    found = {preset: _differences(ours, flat(tree)) for preset, tree in presets.items()}
    preset = min(found, key=lambda name: len(found[name]))
    return Comparison(preset=preset, differences=found[preset])


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = [name for name in ours | theirs if name not in _OF_EVERY_RUN]
    return [(name, ours.get(name), theirs.get(name)) for name in names if ours.get(name) != theirs.get(name)]


def value_text(value: object) -> str:
    """A setting's value as a reader writes it."""
    if value is None:
        return "not set"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "(empty)" if value == "" else str(value).lower() if isinstance(value, bool) else str(value)


__all__ = ["Comparison", "compare", "flat", "value_text"]
