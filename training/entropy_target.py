"""The weight of the entropy bonus, adapted so that the policy's mean entropy follows a target.

    w <- clip(w + RATE (entropy_target - mean H), 0, WEIGHT_MAX)          after each step that measured H

This is dual ascent on the constraint mean H >= entropy_target, as for the temperature of SAC (Haarnoja et al. 2018, arXiv
1812.05905), with H exact over legal sets. H is the mean over all branching tokens of the step. The weight begins at
`training.entropy_weight` and is saved in checkpoints, so a resumed or replayed step has exactly the same weight.
"""

import math

from training.settings import TrainingSettings

RATE = 0.02
"""Change of the weight per step and nat: 0.3 nats below the target raise it by 0.06 in ten steps."""
WEIGHT_MAX = 0.5
"""Upper bound of the weight, in centres per nat. Above it the bonus would count more than the returns."""


def entropy_weight(held: float | None, settings: TrainingSettings) -> float:
    """The weight of the entropy bonus in the step that begins with the state `held`; None: no step has moved it."""
    return settings.entropy_weight if held is None or not settings.entropy_target else held


def next_entropy_weight(held: float | None, measured: float | None, settings: TrainingSettings) -> float | None:
    """The state after a step.

    Args:
        measured: mean entropy of the step, nats per branching token; None, or not finite: the weight stays.

    Returns:
        the weight of the next step; None without a target.
    """
    if not settings.entropy_target:
        return None
    weight = entropy_weight(held, settings)
    if measured is None or not math.isfinite(measured):
        return weight
    return min(WEIGHT_MAX, max(0.0, weight + RATE * (settings.entropy_target - measured)))
