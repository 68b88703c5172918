"""Intervals, differences, and how many games a claim takes: pure arithmetic over values and the clusters they belong to.

Values of one cluster (forks of one start, the seven rotations of one seating, positions of one source game) are not independent,
so whole clusters are resampled (cluster bootstrap: Cameron, Gelbach & Miller 2008). A share of which every cluster says the same,
0 or 1, has no spread to resample: it gets Wilson's interval over the clusters (Wilson 1927). Few clusters widen the interval as
Student's distribution would.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

Z95 = 1.959963984540054
"""Standard normal quantile of a two-sided 95 % interval."""
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571)
"""Its counterpart of Student's distribution for 1 to 5 degrees of freedom."""
FEWEST_CLUSTERS = 2
"""Below, there is nothing to resample, and no interval."""


def cluster_bootstrap(
    values: np.ndarray, clusters: np.ndarray, resamples: int, seed: int, *, tail: float = 0.025
) -> tuple[float, float]:
    """Percentile interval of the mean of `values`, resampling whole clusters with replacement; `tail`: left out at either end."""
    _, index = np.unique(clusters, return_inverse=True)
    sums, sizes = np.bincount(index, weights=values), np.bincount(index)
    drawn = np.random.default_rng(seed).integers(0, len(sums), (resamples, len(sums)))
    means = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def expanded_tail(clusters: int) -> float:
    """The tail at which a percentile interval of so few clusters is as wide as Student's (Hesterberg 2015, section 4.2).

    Phi(-sqrt(n / (n - 1)) t), t being Student's 97.5 % quantile at n - 1 degrees of freedom; 0.025 as n grows.
    """
    freedom = clusters - 1
    return NormalDist().cdf(-math.sqrt(clusters / freedom) * _student(freedom))


def _student(freedom: int) -> float:
    """Student's 97.5 % quantile: from the table, then by the expansion around the normal one (Abramowitz & Stegun 26.7.5)."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z2 = successes / trials, Z95**2 / trials
    middle = (share + z2 / 2) / (1 + z2)
    half = Z95 / (1 + z2) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(
    values: Sequence[float] | np.ndarray, clusters: Sequence[str], resamples: int, seed: int, *, share: bool = False
) -> tuple[float, float]:
    """95 % interval of the mean; `share`: the values lie between 0 and 1."""
    array, names = np.asarray(values, float), np.asarray(clusters)
    if share and (np.all(array == 0) or np.all(array == 1)):
        count = len(np.unique(names))
        return wilson(float(array[0]) * count, count)
    return cluster_bootstrap(array, names, resamples, seed, tail=expanded_tail(len(np.unique(names))))


def cluster_means(values: Sequence[float] | np.ndarray, clusters: Sequence[str]) -> dict[str, float]:
    """The mean of each cluster, by its name, in the order in which they appear."""
    sums: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        sums.setdefault(cluster, []).append(float(value))
    return {cluster: sum(some) / len(some) for cluster, some in sums.items()}


def clusters_for_width(means: Sequence[float], width: float) -> int:
    """Clusters whose 95 % interval is about `width` wide from end to end, by the spread of cluster means seen so far.

    n = (2 z s / width)^2, s being their standard deviation.
    """
    spread = float(np.std(np.asarray(means, float), ddof=1)) if len(means) > 1 else 0.0
    return max(FEWEST_CLUSTERS, math.ceil((2 * Z95 * spread / width) ** 2))


def clusters_to_show(differences: Sequence[float]) -> int | None:
    """Clusters that would set a paired difference of this mean and spread apart from 0; None where the mean is 0."""
    array = np.asarray(differences, float)
    mean = float(array.mean())
    if not mean or len(array) < FEWEST_CLUSTERS:
        return None
    return max(FEWEST_CLUSTERS, math.ceil((Z95 * float(array.std(ddof=1)) / mean) ** 2))
