"""The gain of each improvement over the previous system, read from a stored result of `entente bench ablation --json`.

Nothing is measured here. A result without the ablation is refused with a sentence.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.errors import InputError
from telemetry.read_file import LARGEST_RESULT, read_text

_GAIN, _LOSS = "gain_", "loss_"
_SPREAD = ("_low", "_high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """One improvement."""

    name: str
    """As "prefix cache"."""
    gain: float | None
    """CPU seconds per step of the previous system, divided by those with only this improvement on; None if not measured."""
    loss: float | None
    """CPU seconds per step of Entente with only this improvement off, divided by those with all on; None if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The whole table."""

    rows: tuple[Improvement, ...]
    """Largest gain first."""
    figures: tuple[tuple[str, str], ...]
    """Other figures of the same result, as texts: name and value."""
    machine: str
    """The machine of the measurement, as text."""


_FIGURES = {
    "ablation_speedup": ("times as cheap as the old way, in CPU seconds", "{:.1f}"),
    "ablation_cpu_s_new": ("CPU seconds a step", "{:.2f}"),
    "ablation_cpu_s_old": ("CPU seconds a step, the old way", "{:.2f}"),
}


def read_ablation(file: Path) -> Ablation:
    """Read the table from `file`, which holds the JSON object alone or as the last line of the command's output.

    Raises:
        InputError: it is not there, or holds no ablation.
    """
    outcome = _last_object(file)
    metrics = outcome.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    found = [name for name in map(str, metrics) if name.startswith((_GAIN, _LOSS)) and not name.endswith(_SPREAD)]
    if not found:
        raise InputError(f"'{file}' holds no ablation: `entente bench ablation --json` measures one")
    names = dict.fromkeys(name.removeprefix(_GAIN).removeprefix(_LOSS) for name in found)
    rows = [
        Improvement(name=name.replace("_", " "), gain=_number(metrics.get(_GAIN + name)), loss=_number(metrics.get(_LOSS + name)))
        for name in names
    ]
    figures = [(what, shown.format(metrics[name])) for name, (what, shown) in _FIGURES.items() if _number(metrics.get(name))]
    return Ablation(
        rows=tuple(sorted(rows, key=lambda row: -(row.gain or row.loss or 0.0))),
        figures=tuple(figures),
        machine=_machine(outcome.get("machine")),
    )


def _machine(outcome: object) -> str:
    if not isinstance(outcome, Mapping):
        return "an unknown machine"
    cores, platform, gpus = (outcome.get(name, "?") for name in ("cpu_cores", "platform", "gpus"))
    return f"{cores} cores of {platform}, GPUs: {gpus}"


def _last_object(file: Path) -> Mapping[str, Any]:
    text = read_text(file, at_most=LARGEST_RESULT, what="result of `entente bench ablation --json`")
    for candidate in (text, *reversed(text.strip().splitlines()[-1:])):
        try:
            outcome = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(outcome, Mapping):
            return outcome
    raise InputError(f"'{file}' does not end with a JSON object: store what `entente bench ablation --json` printed")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None
