"""What moves from step to step: the learning rate, and the weight of the entropy bonus.

The learning rate of a step: a warm-up, then a constant rate or a decay.

    rate(s) = learning_rate * w(s) * d(s)                            s: number of the step, from 1
    w(s) = min(1, s / warm_up_steps)                                 1 without a warm-up
    d(s) = 1                                                         constant
    d(s) = 1 - (1 - f) * p                                           linear;  p = part of the way from the warm-up's
    d(s) = f + (1 - f) * (1 + cos(pi p)) / 2,  f = FINAL_SHARE       cosine      end to decay_steps, from 0 to 1

The rate depends only on the step number and the settings. So it needs no state in the checkpoint, and a resumed or replayed step
has exactly the same rate. All updates of a step have the same rate.

The weight of the entropy bonus, adapted so that the policy's mean entropy follows a target.

    w <- clip(w + RATE (entropy_target - mean H), 0, WEIGHT_MAX)          after each step that measured H

This is dual ascent on the constraint mean H >= entropy_target, as for the temperature of SAC (Haarnoja et al. 2018, arXiv
1812.05905), with H exact over legal sets. H is the mean over all branching tokens of the step. The weight begins at
`training.entropy_weight` and is saved in checkpoints, so a resumed or replayed step has exactly the same weight.
"""

import math

import torch

from training.settings import TrainingSettings

FINAL_SHARE = 0.1
"""Share of the rate at the end of a decay, as usual for cosine schedules; later steps keep it."""
RATE = 0.02
"""Change of the weight per step and nat: 0.3 nats below the target raise it by 0.06 in ten steps."""
WEIGHT_MAX = 0.5
"""Upper bound of the weight, in centres per nat. Above it the bonus would count more than the returns."""


def rate_at(step: int, settings: TrainingSettings) -> float:
    """Learning rate of step `step`, counted from 1."""
    warm = settings.warm_up_steps
    rising = min(1.0, step / warm) if warm else 1.0
    return settings.learning_rate * rising * _decay(step, settings)


def _decay(step: int, settings: TrainingSettings) -> float:
    if settings.rate_schedule == "constant":
        return 1.0
    first, last = settings.warm_up_steps, settings.decay_steps
    part = min(1.0, max(0.0, (step - first) / (last - first)))
    left = (1 + math.cos(math.pi * part)) / 2 if settings.rate_schedule == "cosine" else 1 - part
    return FINAL_SHARE + (1 - FINAL_SHARE) * left


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimiser.param_groups:
        group["lr"] = rate


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
