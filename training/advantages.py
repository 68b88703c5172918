"""Group-relative advantages: a decision against the others that faced the same choice.

A group holds the decisions of one power, at one phase, of the forks of one snapshot: only facts known before the decision.
"""

import numpy as np


def leave_one_out(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return minus the mean return of the *other* members of the group: A_i = n / (n - 1) * (R_i - mean(R)).

    An unbiased baseline, since no decision's own return enters it (RLOO: Kool et al. 2019; Ahmadian et al. 2024,
    arXiv 2402.14740); no division by the group's deviation, which would overweight near-ties (Liu et al. 2025, arXiv 2503.20783).

    Args:
        returns: float [rows].
        groups: int [rows], any numbering; each group needs at least 2 members.

    Returns:
        float64 [rows]; sums to 0 within each group.

    Raises:
        ValueError: a group of one.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError("an advantage group needs at least 2 decisions")
    values = returns.astype(np.float64)
    means = np.bincount(index, weights=values) / sizes
    return (values - means[index]) * (sizes / (sizes - 1))[index]
