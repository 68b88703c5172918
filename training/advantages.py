"""Group-relative advantages: each decision is compared with the other decisions of its advantage group.

An advantage group is the decisions of one start group, power and phase name: only facts known before the decision. Moving means
come from earlier steps only, so a decision's own return is never part of its baseline. They are saved in checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from training.settings import TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingMeans:
    """Moving means over past steps."""

    power_means: Mapping[str, float] = field(default_factory=dict)
    """Moving mean return of each power's decisions."""
    mean_square: float | None = None
    """Moving mean of the squared advantages, before scaling; None before the first step."""


def advantages_of(
    returns: np.ndarray,
    groups: np.ndarray,
    powers: Sequence[str],
    settings: TrainingSettings,
    before: MovingMeans,
) -> tuple[np.ndarray, MovingMeans]:
    """The advantage of each decision of a step, and the moving means after the step.

    With advantage_baseline 'power' (role-conditioned advantages: Liu et al. 2025, SPIRAL, arXiv 2506.24119), a power without a
    moving mean yet is compared within its groups.

    Args:
        returns: float [rows].
        groups: int [rows], as in `leave_one_out`.
        powers: [rows] the power of each decision.
        before: moving means of the earlier steps.

    Returns:
        advantages: float32 [rows].
        moving: the moving means for the next step.

    Raises:
        ValueError: a group has one member only.
    """
    named = np.asarray(powers, dtype=object)
    found = leave_one_out(returns, groups)
    if settings.advantage_baseline == "power":
        for power, mean in before.power_means.items():
            found = np.where(named == power, returns - mean, found)
    keeps = settings.moving_decay
    means = dict(before.power_means)
    for power in sorted(set(powers)):
        mean = float(returns[named == power].mean())
        means[power] = keeps * means[power] + (1 - keeps) * mean if power in means else mean
    square = float(np.square(found).mean()) if len(found) else None
    after = before.mean_square
    if square is not None:
        after = square if after is None else keeps * after + (1 - keeps) * square
    divisor = {"none": None, "batch": square, "running": square if before.mean_square is None else before.mean_square}
    if by := divisor[settings.advantage_scale]:
        found = found / np.sqrt(by)
    return found.astype(np.float32), MovingMeans(power_means=means, mean_square=after)


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
