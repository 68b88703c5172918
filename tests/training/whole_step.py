"""A step of a trainer, and its publication."""

from entente.records.policy_version import TrainedStep
from entente.training.process import TrainerProcess
from entente.training.trainer import Trainer


def whole_step(trainer: Trainer | TrainerProcess, step: int, start_groups: int) -> TrainedStep:
    metrics = trainer.step(step, start_groups)
    return TrainedStep(published=trainer.saved(), metrics=metrics)
