"""Figures of an arm from the latencies of its passes: means, 99th percentiles, throughput and goodput. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import median

import numpy as np

ARMS = ("off", "on")
"""Without the adapter, and with it."""


@dataclass(slots=True, kw_only=True)
class Pass:
    """The measurements of one pass over all requests."""

    seconds: float = 0.0
    """Wall seconds from the first request to the last completion."""
    ttft_ms: list[float] = field(default_factory=list)
    """Milliseconds to the first token, by request."""
    tpot_ms: list[float] = field(default_factory=list)
    """Milliseconds a token after the first, by request with several tokens."""
    itl_ms: list[float] = field(default_factory=list)
    """Milliseconds between consecutive tokens of a request."""
    e2el_ms: list[float] = field(default_factory=list)
    """Milliseconds to the whole completion, by request, measured by the caller."""
    cpu_s: float = 0.0
    """CPU seconds of this process, without an engine core in another process."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """Figures of one arm of a candidate: milliseconds over all passes, and the median rates of the passes."""

    ttft_ms_mean: float
    ttft_ms_p99: float
    tpot_ms_mean: float
    tpot_ms_p99: float
    itl_ms_mean: float
    itl_ms_p99: float
    e2el_ms_mean: float
    e2el_ms_p99: float
    decisions_per_s: float
    """Completed requests a second."""
    tokens_per_s: float
    """Completion tokens a second."""
    prompt_tokens_per_s: float
    cpu_ms: float
    """CPU milliseconds of a request; unlike wall time, other work on the machine hardly changes it."""
    cache_hit: float
    """Share of prompt tokens that came from the prefix cache."""
    spread: float
    """Noise: largest minus smallest throughput of a pass, over the median."""
    seconds: float
    """Total over all passes."""
    requests: int
    """Total over all passes."""
    e2el_ms: tuple[float, ...]
    """Milliseconds of each request, sorted."""

    def goodput_per_s(self, max_latency_ms: float) -> float:
        """Requests a second that were completed within the latency."""
        return self.decisions_per_s * sum(value <= max_latency_ms for value in self.e2el_ms) / len(self.e2el_ms)


FIGURES = tuple(each.name for each in fields(ArmFigures) if each.name != "e2el_ms")
"""The figures that are single numbers."""


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
    """The mean; 0 without values, as for an engine that does not report them."""
    return float(np.mean(values)) if values else 0.0


def p99(values: Sequence[float]) -> float:
    """The 99th percentile; 0 without values."""
    return float(np.quantile(values, 0.99)) if values else 0.0
