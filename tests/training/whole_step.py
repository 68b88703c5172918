"""A step of a trainer, and its publication."""

from entente.records.policy_version import TrainedStep
from entente.training.process import TrainerProcess
from entente.training.trainer import Trainer
from storage.distil_store import DistilQuery


def whole_step(
    trainer: Trainer | TrainerProcess, step: int, start_groups: int, distil_targets: DistilQuery | None = None
) -> TrainedStep:
    metrics = trainer.step(step, start_groups, distil_targets)
    return TrainedStep(published=trainer.saved(), metrics=metrics)
