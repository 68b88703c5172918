"""The advantage of each decision, from the returns of its advantage group. Does not load torch."""

import numpy as np

from entente.training.settings import TrainingSettings


def advantages_of(returns: np.ndarray, groups: np.ndarray, settings: TrainingSettings) -> np.ndarray:
    """float32 [rows]: `leave_one_out`, divided by the step's root mean square if `advantage_scale` is 'batch' (ScaleRL: Khatri et
    al. 2025, arXiv 2510.13786). Raises ValueError if a group has one member."""
    advantages = leave_one_out(returns, groups)
    if settings.advantage_scale == "batch" and (square := float(np.square(advantages).mean()) if len(advantages) else 0.0):
        advantages = advantages / np.sqrt(square)
    return advantages.astype(np.float32)


def leave_one_out(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return minus the mean return of the *other* members of the group: A_i = n / (n - 1) * (R_i - mean(R)).

    Unbiased, because the baseline excludes the decision's own return (RLOO: Kool et al. 2019; Ahmadian et al. 2024, arXiv
    2402.14740). Not divided by the group's std, which would overweight near-ties (Liu et al. 2025, arXiv 2503.20783).

    Returns:
        float64 [rows]; sums to 0 within each group.

    Raises:
        ValueError: a group has only one member.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if (sizes < 2).any():
        raise ValueError("an advantage group needs at least 2 decisions")
    values = returns.astype(np.float64)
    means = np.bincount(index, weights=values) / sizes
    return (values - means[index]) * (sizes / (sizes - 1))[index]
