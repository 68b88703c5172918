"""The grid: engine settings to try, the load of each, and candidates that do not fit this machine. Pure functions.

The current settings are the first candidate, for comparison. No two candidates are equal. The key of a candidate depends only on
its values, so that its measurement is found again.
"""

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference.settings import InferenceSettings
from inference.vllm_arguments import slot_rank
from telemetry.errors import InputError
from tuning.settings import TuneSettings

AXES = (
    "max_sequences",
    "max_batched_tokens",
    "gpu_memory_share",
    "kv_cache_gib",
    "block_size",
    "adapter_rank",
    "prefix_caching",
    "adapters",
)
"""Axes that are inference settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Engine settings and a load."""

    settings: InferenceSettings
    concurrency: int = 0
    """Requests in flight; 0 with a `request_rate`."""
    request_rate: float = 0.0
    """Requests that arrive each second; 0 with a `concurrency`."""
    current: bool = False
    """True for the current settings."""

    @property
    def values(self) -> dict[str, Any]:
        """The value of each axis, including the load."""
        load = {"request_rate": self.request_rate} if self.request_rate else {"concurrency": self.concurrency}
        return {name: getattr(self.settings, name) for name in AXES} | load

    @property
    def key(self) -> str:
        """Name of its files."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()[:16]

    def label(self, varied: list[str]) -> str:
        """The values of the `varied` axes as text."""
        values = self.values
        words = " ".join(f"{_SHORT.get(name, name)} {_worded(values[name])}" for name in varied if name in values)
        return f"{words or 'the settings in force'}{' (current)' if self.current and words else ''}"


_SHORT = {
    "max_sequences": "sequences",
    "max_batched_tokens": "tokens",
    "gpu_memory_share": "share",
    "kv_cache_gib": "cache GiB",
    "block_size": "block",
    "adapter_rank": "slot rank",
    "prefix_caching": "prefixes",
    "request_rate": "rate",
    "concurrency": "in flight",
}


def candidates_of(base: InferenceSettings, tuning: TuneSettings, *, on_gpu: bool) -> list[Candidate]:
    """The current settings, then the grid.

    Raises:
        InputError: an axis has no effect on this machine.
    """
    foreign = "kv_cache_gib" if on_gpu else "gpu_memory_share"
    if getattr(tuning, foreign):
        here, there = ("a GPU", "gpu_memory_share") if on_gpu else ("the CPU", "kv_cache_gib")
        raise InputError(f"{foreign} says nothing where the engine computes on {here}: leave it out, or give {there} values")
    loads: list[dict[str, Any]] = [{"concurrency": number} for number in tuning.concurrency]
    loads += [{"request_rate": rate} for rate in tuning.request_rate]
    usual = {"concurrency": base.max_in_flight} if base.max_in_flight in tuning.concurrency else loads[0]
    found = [Candidate(settings=base, current=True, **usual)]
    seen = {found[0].key}
    wished = {name: getattr(tuning, name) for name in AXES} | {"prefix_caching": [w == "on" for w in tuning.prefix_caching]}
    axes = [wished[name] or (getattr(base, name),) for name in AXES]
    for values, load in itertools.product(itertools.product(*axes), loads):
        settings = InferenceSettings.model_validate(base.model_dump() | dict(zip(AXES, values, strict=True)))
        candidate = Candidate(settings=settings, **load)
        if candidate.key not in seen:
            seen.add(candidate.key)
            found.append(candidate)
    return found


def varied_axes(candidates: list[Candidate]) -> list[str]:
    """Axes in which the candidates differ."""
    names = dict.fromkeys(name for candidate in candidates for name in candidate.values)
    return [name for name in names if len({repr(candidate.values.get(name)) for candidate in candidates}) > 1]


def refused(candidates: list[Candidate], check: Callable[[InferenceSettings], None], *, adapter_rank: int) -> dict[str, str]:
    """Candidates that cannot run, by key, with the reason.

    Args:
        check: raises InputError if the memory is too small (`memory_plan.check_memory`).
        adapter_rank: rank of the served adapter.

    Raises:
        InputError: no candidate can run.
    """
    found: dict[str, str] = {}
    for candidate in candidates:
        settings = candidate.settings
        try:
            if settings.adapters != "merge_reload" and slot_rank(settings.adapter_rank) < adapter_rank:
                raise InputError(
                    f"slots of rank {settings.adapter_rank} do not take an adapter of rank {adapter_rank}: "
                    f"give adapter_rank {adapter_rank} or more"
                )
            check(settings)
        except InputError as error:
            found[candidate.key] = str(error)
    if len(found) == len(candidates):
        raise InputError(
            f"none of the {len(candidates)} candidates can run here; the settings in force: {found[candidates[0].key]}"
        )
    return found


def _worded(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
