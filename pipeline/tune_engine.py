"""The tuner: which engine settings draw the most decisions here, with an adapter on, within limits of latency and cache hits.

Each candidate is measured in a process of its own, on the newest requests of a run, and its figures are kept as a JSON file. Its
name is a hash of everything that the figures depend on: settings, load, requests, adapter and versions. So a candidate that was
measured is found again, and one that failed is tried again.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from inference.settings import InferenceSettings
from pipeline.check_settings import check_settings
from pipeline.run_settings import RunSettings
from pipeline.tuning_candidate import recorded_rows
from records.policy_version import PolicyVersion
from storage.adapters import published_versions, read_adapter
from storage.json_files import kept_object, write_json
from storage.runs import RunPaths
from telemetry.errors import InputError
from telemetry.machine import environment
from telemetry.setting_marks import Settings

TUNING_FOLDER = "_tuning"
"""Folder under `runs_root`."""
NOISE = 0.05
"""Smallest gain that counts, even if all passes agree."""

Figures = Mapping[str, Any]


class TuneSettings(Settings):
    """The grid, the requests and the constraints. An axis without values keeps the current setting."""

    model_config = ConfigDict(title="Tuning")

    max_sequences: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (64, 128, 256)
    """Values of inference.max_sequences (vLLM's max_num_seqs); on a GPU 128, 256 and 512."""
    max_batched_tokens: tuple[Annotated[int, Field(ge=256)], ...] = (4096, 8192)
    """Values of inference.max_batched_tokens (vLLM's max_num_batched_tokens); on a GPU 4096, 8192 and 16384."""
    gpu_memory_share: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    """Values of inference.gpu_memory_share, such as 0.85, 0.89 and 0.93; for a GPU."""
    concurrency: Annotated[tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1)] = (128,)
    """Requests in flight; becomes inference.max_in_flight."""
    max_latency_ms: Annotated[float, Field(gt=0)] = 13_000.0
    """Upper bound of the P99 latency in milliseconds, to the whole completion."""
    min_cache_hit: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Least share of prompt tokens from the prefix cache."""
    requests: Annotated[int, Field(ge=8, le=100_000)] = 256
    """Requests of a pass, raised to twice the greatest concurrency if lower."""
    rounds: Annotated[int, Field(ge=1, le=20)] = 2
    """Passes over the requests; rates are medians, and their spread is the noise."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of a candidate in seconds, beside the limit of its engine's start."""


AXES = ("max_sequences", "max_batched_tokens", "gpu_memory_share", "max_in_flight")
"""Settings that are varied; the last is the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Engine settings and a load. The current settings are the first candidate."""

    settings: InferenceSettings
    current: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """The value of each axis."""
        return {name: getattr(self.settings, name) for name in AXES}

    def label(self, varied: Sequence[str]) -> str:
        """The values of the `varied` axes as text."""
        words = " ".join(f"{name} {self.values[name]}" for name in varied)
        return f"{words or 'the current settings'}{' (current)' if self.current and words else ''}"


@dataclass(frozen=True, kw_only=True)
class TuningPlan:
    """What is measured, and what was measured before."""

    settings: RunSettings
    run: str
    """Run whose newest requests and adapter are measured with."""
    tuning: TuneSettings
    folder: Path
    candidates: Sequence[Candidate]
    policy: PolicyVersion | None
    """Newest adapter of the run; None: it has none."""

    @cached_property
    def varied(self) -> list[str]:
        """Axes in which the candidates differ."""
        first = self.candidates[0].values
        return [name for name in first if any(each.values[name] != first[name] for each in self.candidates)]

    @property
    def asked(self) -> int:
        """Requests of one pass."""
        return max(self.tuning.requests, 2 * max(self.tuning.concurrency))

    @cached_property
    def requests(self) -> Path:
        """File of the requests, which are recorded once for each adapter of the run."""
        version = self.policy.version if self.policy else 0
        return self.folder / f"requests-{self.asked}-v{version}.json"

    def job(self, candidate: Candidate, model: Path | None) -> dict[str, Any]:
        """What the process of a candidate is told."""
        return {
            "model": str(model),
            "settings": candidate.settings.model_dump(mode="json"),
            "requests": str(self.requests.resolve()),
            "policy": self.policy.to_json() if self.policy else None,
            "rounds": self.tuning.rounds,
        }

    def file(self, candidate: Candidate) -> Path:
        """File of a candidate's figures."""
        whole = self.job(candidate, None) | {"requests": self.requests.name, "machine": environment()}
        whole["policy"] = self.policy.adapter_hash if self.policy else ""
        key = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]
        return self.folder / "candidates" / f"{key}.json"

    def measured(self) -> dict[Candidate, Figures]:
        """Figures of the candidates that are measured."""
        found = {each: kept_object(self.file(each)) for each in self.candidates}
        return {each: figures for each, figures in found.items() if figures}

    def describe(self) -> dict[str, Any]:
        """The plan as `--dry-run` prints it."""
        measured = self.measured()
        adapter = f"policy version {self.policy.version}" if self.policy else "none"
        state = {True: "measured before", False: "to be measured"}
        return {
            "command": "bench tune",
            "requests": {"of": self.run, "each_pass": self.asked, "adapter": adapter},
            "candidates": {
                f"{number} {each.label(self.varied)}": state[each in measured] for number, each in enumerate(self.candidates, 1)
            },
            "files": {"folder": str(self.folder)},
        }


def plan_tuning(run: str, settings: RunSettings, tuning: TuneSettings, output: Path | None) -> TuningPlan:
    """The plan: the current settings, then the grid.

    Args:
        settings: those to begin with.
        output: folder of the results; None: one under `runs_root`, named after the run.

    Raises:
        InputError: settings contradict each other.
    """
    base = settings.inference.model_copy(update={"urls": ()})
    check_settings(settings.model_copy(update={"inference": base}))
    axes = [getattr(tuning, name) or (getattr(base, name),) for name in AXES[:-1]]
    load = base.max_in_flight if base.max_in_flight in tuning.concurrency else tuning.concurrency[0]
    candidates = [Candidate(settings=base.model_copy(update={"max_in_flight": load}), current=True)]
    for values in itertools.product(*axes, tuning.concurrency):
        changed = dict(zip(AXES, values, strict=True))
        candidate = Candidate(settings=InferenceSettings.model_validate(base.model_dump() | changed))
        if candidate.values not in [each.values for each in candidates]:
            candidates.append(candidate)
    paths = RunPaths(settings.runs_root / run)
    versions = [version for version in published_versions(paths) if version]
    return TuningPlan(
        settings=settings,
        run=run,
        tuning=tuning,
        folder=output or settings.runs_root / TUNING_FOLDER / run,
        candidates=candidates,
        policy=read_adapter(paths, versions[-1]) if versions else None,
    )


def write_requests(plan: TuningPlan) -> None:
    """Write the requests of all candidates, unless they are there.

    Raises:
        InputError: the run has no decisions, or one is longer than `inference.max_model_length`.
    """
    if plan.requests.is_file():
        return
    longest = plan.settings.inference.max_model_length
    rows = recorded_rows(RunPaths(plan.settings.runs_root / plan.run), plan.asked)
    length = max(len(row["prompt_ids"]) + len(row["legal_offsets"]) - 1 for row in rows)
    if length > longest:
        raise InputError(f"the run's decisions have up to {length} tokens, but inference.max_model_length is {longest}: raise it")
    write_json(plan.requests, rows)


# -- the choice ------------------------------------------------------------------------------------------------------------


def misses(figures: Figures, tuning: TuneSettings) -> str:
    """The violated limits in words; empty if the candidate holds both."""
    found, latency, hit = [], figures["latency_ms_p99"], figures["cache_hit"]
    if latency > tuning.max_latency_ms:
        found.append(f"its P99 latency of {latency:,.0f} ms exceeds max_latency_ms {tuning.max_latency_ms:,.0f}")
    if hit < tuning.min_cache_hit:
        found.append(f"its cache hit share of {hit:.3f} is below min_cache_hit {tuning.min_cache_hit:g}")
    return " and ".join(found)


def choose(found: Mapping[Candidate, Figures], tuning: TuneSettings) -> tuple[Candidate | None, str]:
    """The fastest candidate within the limits, or None; and the reason in a sentence.

    The current settings stay unless another candidate is faster by more than the passes of either differ.
    """
    if not found:
        return None, "no candidate could be measured"
    holding = [each for each, figures in found.items() if not misses(figures, tuning)]
    if not holding:
        fastest = max(found, key=lambda each: found[each]["decisions_per_s"])
        return None, f"no candidate holds the constraints; of the fastest, {misses(found[fastest], tuning)}"
    best = max(holding, key=lambda each: found[each]["decisions_per_s"])
    current = next((each for each in holding if each.current), None)
    if best.current:
        return best, "the current settings are the fastest that hold the constraints"
    if current is not None:
        gain = found[best]["decisions_per_s"] / found[current]["decisions_per_s"] - 1
        noise = max(found[best]["spread"], found[current]["spread"], NOISE)
        if gain <= noise:
            return current, f"the current settings stay: the fastest candidate gains {gain:.0%}, and passes differ by {noise:.0%}"
    return best, "the most decisions a second within the constraints"


def tuned_toml(chosen: Candidate, remarks: Sequence[str]) -> str:
    """The chosen settings as a file for `--config`; `remarks` become its first lines."""
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
    plan: TuningPlan, found: Mapping[Candidate, Figures], failed: Mapping[Candidate, str], chosen: Candidate | None
) -> list[dict[str, str]]:
    """One row for each candidate: the fastest first, the failed last with the reason."""
    rows = []
    for each in sorted(plan.candidates, key=lambda each: -found[each]["decisions_per_s"] if each in found else 0.0):
        figures = found.get(each)
        row = {"candidate": each.label(plan.varied)}
        row |= {head: form.format(figures[name]) if figures else "" for head, (name, form) in COLUMNS.items()}
        note = "chosen" if each is chosen else "misses" if figures and misses(figures, plan.tuning) else failed.get(each, "")
        rows.append(row | {"note": note})
    return rows
