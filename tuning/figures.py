"""From moments to figures: latencies of a pass become means, 99th percentiles, throughput and goodput. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median

import numpy as np

ARMS = ("off", "on")
"""Without the adapter, and with it."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """What one pass over the requests of one arm came to."""

    seconds: float = 0.0
    """From the first request to the last answer."""
    ttft_ms: list[float] = field(default_factory=list)
    """Each request's milliseconds to its first token."""
    tpot_ms: list[float] = field(default_factory=list)
    """Each request's milliseconds a token after the first; of those with more than one."""
    itl_ms: list[float] = field(default_factory=list)
    """Milliseconds between any two tokens of a request that follow one another."""
    e2el_ms: list[float] = field(default_factory=list)
    """Each request's milliseconds to its whole answer, as its asker saw them."""
    cpu_s: float = 0.0
    """CPU seconds of the process meanwhile; an engine core in a process of its own is not in it."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """One arm of one candidate; milliseconds are over all its passes, rates the medians of them."""

    ttft_ms_mean: float
    ttft_ms_p99: float
    tpot_ms_mean: float
    tpot_ms_p99: float
    itl_ms_mean: float
    itl_ms_p99: float
    e2el_ms_mean: float
    e2el_ms_p99: float
    decisions_per_s: float
    """Requests answered a second."""
    tokens_per_s: float
    """Completion tokens a second."""
    prompt_tokens_per_s: float
    cpu_ms: float
    """Milliseconds of CPU time for a request: what is left of speed where other work slows the clock's down."""
    cache_hit: float
    """Share of prompt tokens that came from the prefix cache."""
    spread: float
    """Largest throughput of a pass less the smallest, over their median: what noise is here."""
    seconds: float
    """Of all passes."""
    requests: int
    """Of all passes."""
    e2el_ms: tuple[float, ...]
    """Milliseconds of each request, rising."""

    def goodput_per_s(self, max_latency_ms: float) -> float:
        """Requests a second that were answered within the latency."""
        return self.decisions_per_s * sum(value <= max_latency_ms for value in self.e2el_ms) / len(self.e2el_ms)


FIGURES = tuple(each.name for each in fields(ArmFigures) if each.name != "e2el_ms")
"""Those that are single numbers."""


def arm_figures(passes: Sequence[Pass]) -> ArmFigures:
    """The figures of one arm."""
    rates = [len(each.e2el_ms) / each.seconds for each in passes]
    kinds = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
    values = {name: [value for each in passes for value in getattr(each, name)] for name in kinds}
    latencies = {f"{name}_mean": mean(values[name]) for name in kinds} | {f"{name}_p99": p99(values[name]) for name in kinds}
    return ArmFigures(
        **latencies,
        decisions_per_s=median(rates),
        tokens_per_s=median(each.completion_tokens / each.seconds for each in passes),
        prompt_tokens_per_s=median(each.prompt_tokens / each.seconds for each in passes),
        cpu_ms=median(1e3 * each.cpu_s / len(each.e2el_ms) for each in passes),
        cache_hit=sum(each.cached_tokens for each in passes) / max(1, sum(each.prompt_tokens for each in passes)),
        spread=(max(rates) - min(rates)) / median(rates),
        seconds=sum(each.seconds for each in passes),
        requests=sum(len(each.e2el_ms) for each in passes),
        e2el_ms=tuple(sorted(round(value, 3) for value in values["e2el_ms"])),
    )


def mean(values: Sequence[float]) -> float:
    """0 where there are none: an engine that does not tell."""
    return float(np.mean(values)) if values else 0.0


def p99(values: Sequence[float]) -> float:
    """0 where there are none."""
    return float(np.quantile(values, 0.99)) if values else 0.0
