"""Group-relative advantages: each decision is compared with the other decisions of its advantage group.

An advantage group is the decisions of one start group, power and phase name: only facts known before the decision.
"""

import numpy as np

from entente.training.settings import TrainingSettings


def advantages_of(returns: np.ndarray, groups: np.ndarray, settings: TrainingSettings) -> np.ndarray:
    """The advantage of each decision of a step, float32 [rows]: `leave_one_out`, divided by the root mean square of the step if
    `settings.advantage_scale` is 'batch' (ScaleRL: Khatri et al. 2025, arXiv 2510.13786).

    Args:
        returns: float [rows].
        groups: int [rows], as in `leave_one_out`.

    Raises:
        ValueError: a group has one member only.
    """
    found = leave_one_out(returns, groups)
    if settings.advantage_scale == "batch" and (square := float(np.square(found).mean()) if len(found) else 0.0):
        found = found / np.sqrt(square)
    return found.astype(np.float32)


def leave_one_out(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return minus the mean return of the *other* members of the group: A_i = n / (n - 1) * (R_i - mean(R)).

    The baseline is unbiased, because it excludes the decision's own return (RLOO: Kool et al. 2019; Ahmadian et al. 2024,
    arXiv 2402.14740). It is not divided by the group's deviation, which would overweight near-ties (Liu et al. 2025,
    arXiv 2503.20783).

    Args:
        returns: float [rows].
        groups: int [rows], any numbering; each group needs at least 2 members.

    Returns:
        float64 [rows]; sums to 0 within each group.

    Raises:
        ValueError: a group has one member only.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError("an advantage group needs at least 2 decisions")
    values = returns.astype(np.float64)
    means = np.bincount(index, weights=values) / sizes
    return (values - means[index]) * (sizes / (sizes - 1))[index]
