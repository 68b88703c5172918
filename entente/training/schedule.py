"""The learning rate of a step: a warm-up, then a constant rate or a decay.

    rate(s) = learning_rate * w(s) * d(s)                            s: number of the step, from 1
    w(s) = min(1, s / warm_up_steps)                                 1 without a warm-up
    d(s) = 1                                                         constant
    d(s) = 1 - (1 - f) * p                                           linear;  p = part of the way from the warm-up's
    d(s) = f + (1 - f) * (1 + cos(pi p)) / 2,  f = FINAL_SHARE       cosine      end to decay_steps, from 0 to 1

The rate depends only on the step number and the settings. So it needs no state in the checkpoint, and a resumed or replayed step
has exactly the same rate. All updates of a step have the same rate.
"""

import math

import torch

from entente.training.settings import TrainingSettings

FINAL_SHARE = 0.1
"""Share of the rate at the end of a decay, as usual for cosine schedules; later steps keep it."""


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
