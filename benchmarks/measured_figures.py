"""Figures of other benchmarks that the pipeline on paper takes in place of what it assumes, from the files that `--json` filled.

The files must be of one machine with one set of versions: other figures say nothing about each other.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telemetry.errors import InputError
from telemetry.read_file import LARGEST_RESULT, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure comes from."""

    benchmark: str
    figure: str
    scale: float = 1.0
    """Factor from the figure's unit to that of the field."""

    @property
    def text(self) -> str:
        return f"{self.figure} of `bench {self.benchmark}`"


SOURCES: Mapping[str, Source] = {
    "game_s": Source(benchmark="decode", figure="client_ms_per_decision_http", scale=1e-3),
    "uncached_tokens": Source(benchmark="decode", figure="uncached_tokens_per_decision"),
    "unique_share": Source(benchmark="trainer", figure="unique_token_share_recorded"),
    "orchestration_s": Source(benchmark="orchestration", figure="prefect_client_cpu_ms_per_step", scale=1e-3),
}
"""Field of `Hardware` or `Work` -> the figure that replaces its default."""


def read_measured(files: Sequence[Path]) -> dict[str, float]:
    """The measured value of each field of `SOURCES` that the files have.

    Raises:
        InputError: a file cannot be read, has none of these figures or a bad one, or two files are of different machines or have
            the same figure.
    """
    found: dict[str, float] = {}
    machine: tuple[Path, dict[str, Any]] | None = None
    for file in files:
        taken = False
        for outcome in _outcomes(file):
            if machine is not None and machine[1] != outcome["machine"]:
                raise InputError(
                    f"'{file}' was measured on another machine or with other versions than '{machine[0]}': "
                    "give figures of one sitting"
                )
            machine = file, outcome["machine"]
            for name, source in SOURCES.items():
                if outcome["benchmark"] == source.benchmark and source.figure in outcome["metrics"]:
                    if name in found:
                        raise InputError(f"'{file}' repeats {source.text}: give each figure once")
                    found[name] = source.scale * _positive(outcome["metrics"][source.figure], source, file)
                    taken = True
        if not taken:
            wanted = ", ".join(source.text for source in SOURCES.values())
            raise InputError(f"'{file}' has no figure that the pipeline on paper takes: {wanted}")
    return found


def _outcomes(file: Path) -> list[dict[str, Any]]:
    """The outcomes in a file: what `bench NAME --json` printed, its last line the object, or what `bench all --out` wrote."""
    text = read_text(file, at_most=LARGEST_RESULT, what="file of figures").strip()
    try:
        try:
            content = json.loads(text)
        except ValueError:
            content = json.loads(text.splitlines()[-1])
        outcomes = list(content["benchmarks"].values()) if "benchmarks" in content else [content]
        return [
            {"benchmark": each["benchmark"].partition(",")[0], "metrics": dict(each["metrics"]), "machine": dict(each["machine"])}
            for each in outcomes
            if "error" not in each
        ]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(
            f"'{file}' holds no figures of a benchmark ({type(error).__name__}): "
            "fill it with `entente bench decode --json > FILE`"
        ) from error


def _positive(value: Any, source: Source, file: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"'{file}' says that {source.text} is {value!r}: it must be a number above 0")
    return float(value)
