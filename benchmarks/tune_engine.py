"""The tuner: finds the engine settings with the highest decision rate, with an adapter, within limits of latency and cache hits.

Candidates play the same start groups in separate processes (`tuning_candidate.py`): a crash or hang is a row with its reason."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from entente.inference.server_arguments import start_limit_s
from entente.inference.settings import InferenceSettings
from entente.settings.check_settings import check_settings
from entente.settings.find_model import check_room
from entente.settings.run_settings import RunSettings
from entente.telemetry.child import ChildResult, run_child
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter
from entente.telemetry.setting_marks import Settings

TUNING_FOLDER = "_tuning"
NOISE = 0.05
"""Minimum relative gain, even if all passes agree."""

Figures = Mapping[str, Any]


class TuneSettings(Settings):
    """The grid, the load and the constraints. An axis without values keeps the current setting."""

    model_config = ConfigDict(title="Tuning")

    max_sequences: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (64, 128, 256)
    """Values of inference.max_sequences (vLLM's max_num_seqs); on a GPU 128, 256 and 512."""
    max_batched_tokens: tuple[Annotated[int, Field(ge=256)], ...] = (4096, 8192)
    """Values of inference.max_batched_tokens (vLLM's max_num_batched_tokens); on a GPU 4096, 8192 and 16384."""
    gpu_memory_utilization: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    """Values of inference.gpu_memory_utilization, such as 0.85, 0.89 and 0.93; for a GPU."""
    max_latency_ms: Annotated[float, Field(gt=0)] = 13_000.0
    """Upper bound on the P99 end-to-end latency, in milliseconds."""
    min_cache_hit: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Minimum fraction of prompt tokens from the prefix cache."""
    start_groups: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Start groups per pass, all played concurrently."""
    rounds: Annotated[int, Field(ge=1, le=20)] = 2
    """Passes over the start groups; rates are medians, and their spread is the noise."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit per candidate in seconds, without the engine's start, which has its own."""


AXES = ("max_sequences", "max_batched_tokens", "gpu_memory_utilization")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    settings: InferenceSettings
    current: bool = False

    @property
    def values(self) -> dict[str, Any]:
        return {name: getattr(self.settings, name) for name in AXES}

    def label(self, varied: Sequence[str]) -> str:
        words = " ".join(f"{name} {self.values[name]}" for name in varied)
        return f"{words or 'the current settings'}{' (current)' if self.current and words else ''}"


def candidates_of(settings: RunSettings, tuning: TuneSettings) -> list[Candidate]:
    """The current settings, then the grid, without what does not fit this machine beside the run's trainer. Raises InputError if
    settings contradict each other."""
    base = settings.inference.model_copy(update={"urls": ()})
    check_settings(settings.model_copy(update={"inference": base}))
    candidates = [Candidate(settings=base, current=True)]
    for values in itertools.product(*(getattr(tuning, name) or (getattr(base, name),) for name in AXES)):
        changed = dict(zip(AXES, values, strict=True))
        candidate = Candidate(settings=InferenceSettings.model_validate(base.model_dump() | changed))
        if candidate.values in [each.values for each in candidates]:
            continue
        try:
            check_room(settings.model_copy(update={"inference": candidate.settings}), trains=True)
        except InputError as error:
            reporter().say(f"left out {candidate.label(AXES)}, which no run could use: {error}")
        else:
            candidates.append(candidate)
    return candidates


def varied_axes(candidates: Sequence[Candidate]) -> list[str]:
    return [name for name in AXES if len({each.values[name] for each in candidates}) > 1]


async def measure_candidates(
    settings: RunSettings, tuning: TuneSettings, candidates: Sequence[Candidate], folder: Path
) -> tuple[dict[Candidate, Figures], dict[Candidate, ChildResult]]:
    """Measure the candidates sequentially; returns the figures, and the failures. Writes logs to `folder`."""
    measured, failed, varied = dict[Candidate, Figures](), dict[Candidate, ChildResult](), varied_axes(candidates)
    for number, candidate in enumerate(candidates, 1):
        job = {
            "run": str(settings.paths.root.resolve()),
            "settings": candidate.settings.model_dump(mode="json"),
            "threads": max(settings.threads),
            "start_groups": tuning.start_groups,
            "rounds": tuning.rounds,
        }
        limit_s = start_limit_s(candidate.settings) + tuning.timeout_s
        child = await run_child("benchmarks.tuning_candidate", job, folder / f"candidate-{number}.log", limit_s=limit_s)
        if child.answer is None:
            failed[candidate] = child
        else:
            measured[candidate] = child.answer
        words = f"{child.answer['decisions_per_s']:,.1f} decisions/s" if child.answer else f"failed: {child.why}"
        reporter().say(f"{number} of {len(candidates)}  {candidate.label(varied)}: {words}")
    return measured, failed


def misses(figures: Figures, tuning: TuneSettings) -> str:
    """The violated limits in words; empty if there are none."""
    reasons, latency, hit = [], figures["latency_ms_p99"], figures["cache_hit"]
    if latency > tuning.max_latency_ms:
        reasons.append(f"its P99 latency of {latency:,.0f} ms exceeds max_latency_ms {tuning.max_latency_ms:,.0f}")
    if hit < tuning.min_cache_hit:
        reasons.append(f"its cache hit share of {hit:.3f} is below min_cache_hit {tuning.min_cache_hit:g}")
    return " and ".join(reasons)


def choose(measured: Mapping[Candidate, Figures], tuning: TuneSettings) -> tuple[Candidate | None, str]:
    """The fastest candidate within the limits, or None; and the reason. Keeps the current settings unless another is faster by
    more than the spread of the passes of either."""
    if not measured:
        return None, "no candidate could be measured"
    holding = [each for each, figures in measured.items() if not misses(figures, tuning)]
    if not holding:
        fastest = max(measured, key=lambda each: measured[each]["decisions_per_s"])
        return None, f"no candidate satisfies the constraints; of the fastest, {misses(measured[fastest], tuning)}"
    best = max(holding, key=lambda each: measured[each]["decisions_per_s"])
    current = next((each for each in holding if each.current), None)
    if best.current:
        return best, "the current settings are the fastest within the constraints"
    if current is not None:
        gain = measured[best]["decisions_per_s"] / measured[current]["decisions_per_s"] - 1
        noise = max(measured[best]["spread"], measured[current]["spread"], NOISE)
        if gain <= noise:
            return current, f"the current settings stay: the fastest candidate gains {gain:.0%}, and passes differ by {noise:.0%}"
    return best, "the most decisions per second within the constraints"


def tuned_toml(chosen: Candidate, remarks: Sequence[str]) -> str:
    lines = [f"# {remark}" for remark in remarks]
    return "\n".join([*lines, "[inference]", *(f"{name} = {value}" for name, value in chosen.values.items()), ""])


COLUMNS = {
    "dec/s": ("decisions_per_s", "{:,.1f}"),
    "tok/s": ("tokens_per_s", "{:,.0f}"),
    "P99 ms": ("latency_ms_p99", "{:,.0f}"),
    "first token ms": ("first_token_ms", "{:,.0f}"),
    "hits": ("cache_hit", "{:.0%}"),
    "+-": ("spread", "{:.0%}"),
}
"""Heading -> figure and format."""


def table_rows(
    candidates: Sequence[Candidate],
    measured: Mapping[Candidate, Figures],
    failed: Mapping[Candidate, ChildResult],
    chosen: Candidate | None,
    tuning: TuneSettings,
) -> list[dict[str, str]]:
    """One row for each candidate: the fastest first, failures last."""
    rows, varied = [], varied_axes(candidates)
    for each in sorted(candidates, key=lambda each: -measured[each]["decisions_per_s"] if each in measured else 0.0):
        figures = measured.get(each)
        row = {"candidate": each.label(varied)}
        seen = {name: figures[name] if figures else None for name, _ in COLUMNS.values()}
        row |= {head: "" if seen[name] is None else form.format(seen[name]) for head, (name, form) in COLUMNS.items()}
        why = failed[each].why if each in failed else ""
        note = "chosen" if each is chosen else "misses" if figures and misses(figures, tuning) else why
        rows.append(row | {"note": note})
    return rows
