"""Confidence intervals from clustered values, and the number of games needed to show a difference.

Values of one cluster are not independent: forks of one start, the seven rotations of one seating, positions of one source game.
The bootstrap resamples whole clusters (Cameron, Gelbach & Miller 2008). If all values of a proportion are equal, the interval is
Wilson's over the clusters (Wilson 1927). With few clusters it is widened to Student's t; below FEWEST_CLUSTERS there is none,
because it would not have its nominal coverage. Every interval comes from `estimate`; that of a difference of shares
that are equal in all pairs is Wilson's end, either way (`match_table`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
RESAMPLES = 2000
"""Bootstrap resamples: an end of an interval then varies by about 1/40 of its width between two seeds."""
FEWEST_CLUSTERS = 6
"""Minimum clusters of an interval: its coverage is about 95 % with 6, and 86 % with 4, in a simulation in the tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    mean: float
    low: float | None
    """Lower end; None with fewer than FEWEST_CLUSTERS clusters."""
    high: float | None
    clusters: int = 0
    """0 if unknown."""

    @property
    def interval(self) -> tuple[float, float] | None:
        if self.low is None or self.high is None or 0 < self.clusters < FEWEST_CLUSTERS:
            return None
        return self.low, self.high

    @property
    def excludes_zero(self) -> bool:
        """True if there is an interval and 0 is outside it: the difference is significant."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    def rounded(self, digits: int = 4) -> list[float] | None:
        return None if self.interval is None else [round(end, digits) for end in self.interval]

    def describe(self, form: str, clusters: str = "clusters") -> str:
        return describe_interval(self.interval, self.clusters, form, clusters)


def describe_interval(interval: Sequence[float] | None, count: int, form: str, clusters: str) -> str:
    """`95 % interval [low, high]`, or the reason why there is none. `count` is the number of `clusters`."""
    if interval is None:
        return f"no interval: {describe_shortage(count, clusters)}"
    return f"95 % interval {format_interval(interval, form)}"


def format_interval(interval: Sequence[float] | None, form: str) -> str:
    """`[low, high]`, or `[–]` if there is no interval."""
    return "[–]" if interval is None else f"[{interval[0]:{form}}, {interval[1]:{form}}]"


def describe_shortage(count: int, clusters: str) -> str:
    """As `2 source games, and an interval takes 6`."""
    return f"{format_count(count, clusters)}, and an interval takes {FEWEST_CLUSTERS}"


def format_count(count: int, things: str) -> str:
    """`1 source game`, `2 source games`; `things` is the plural noun."""
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


def estimate(
    values: Sequence[float] | np.ndarray,
    clusters: Sequence[object] | np.ndarray,
    seed: int,
    *,
    share: bool = False,
) -> Estimate:
    """Mean of `values` [n] and its 95 % interval. `clusters` [n]: cluster of each value; `share`: the values are in [0, 1]."""
    array = np.asarray(values, float)
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums, sizes = np.bincount(index, weights=array), np.bincount(index)
    mean, count = float(array.mean()), len(sums)
    if count < FEWEST_CLUSTERS:
        return Estimate(mean=mean, low=None, high=None, clusters=count)
    if share and (np.all(array == 0) or np.all(array == 1)):
        low, high = wilson_interval(float(array[0]) * count, count)
    else:
        tail = _expanded_tail(count)
        sample = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
        low, high = np.quantile(sums[sample].sum(axis=1) / sizes[sample].sum(axis=1), [tail, 1 - tail])
    return Estimate(mean=mean, low=float(low), high=float(high), clusters=count)


def _expanded_tail(clusters: int) -> float:
    """Tail probability that makes a percentile interval as wide as Student's (Hesterberg 2015, section 4.2): Phi(-sqrt(n / (n -
    1)) t), t Student's 97.5 % quantile at n - 1 degrees of freedom; tends to 0.025 for large n."""
    freedom = clusters - 1
    return NormalDist().cdf(-math.sqrt(clusters / freedom) * _student(freedom))


def _student(freedom: int) -> float:
    """Student's 97.5 % quantile for 5 or more degrees of freedom, by an expansion (Abramowitz & Stegun 26.7.5)."""
    z, n = Z95, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (Wilson 1927)."""
    share, z2 = successes / trials, Z95**2 / trials
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 / (1 + z2) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def cluster_means(values: Sequence[float] | np.ndarray, clusters: Sequence[str]) -> dict[str, float]:
    """Mean of each cluster, in the order in which clusters first appear."""
    sums: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums.setdefault(cluster, []).append(float(value))
    return {cluster: sum(some) / len(some) for cluster, some in sums.items()}


def clusters_to_show(differences: Sequence[float]) -> int | None:
    """Clusters needed to distinguish a paired difference of this mean and spread from 0: n = (z s / mean)^2. None if the mean is
    0 or there are fewer than FEWEST_CLUSTERS differences."""
    array = np.asarray(differences, float)
    mean = float(array.mean())
    if not mean or len(array) < FEWEST_CLUSTERS:
        return None
    return max(FEWEST_CLUSTERS, math.ceil((Z95 * float(array.std(ddof=1)) / mean) ** 2))
