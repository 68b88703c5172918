"""Both arms of the trainer benchmarks on one model and one device: our training step and the old one."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.old_step import OldTrainer
from benchmarks.trainer_cases import Case, Shape, made_up_batch, model_of, stir_adapter
from entente.telemetry.errors import TrainingError
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from entente.training.update import Updater, share_rows
from storage.gather import Batch

Step = Callable[[Batch], float]
"""Zeroes the gradient, runs forward and backward over a batch, and returns the loss. It does not step the optimiser."""


class Steps:
    """Both steps of one policy."""

    def __init__(self, policy: Policy, settings: TrainingSettings) -> None:
        self.policy, self.settings = policy, settings
        stir_adapter(policy.parameters())

    def ours(self, **settings: Any) -> Step:
        """Our step. `settings` replace training settings.

        Raises:
            TrainingError: the step used another layout than requested.
        """
        chosen = self.settings.model_copy(update=settings)
        updater = Updater(self.policy, chosen)

        def step(batch: Batch) -> float:
            self.policy.recompute(chosen.recompute)
            self.policy.model.zero_grad(set_to_none=True)
            updates = update_rows(batch, chosen)
            loss = sum(sum(updater.accumulate(batch, rows, advantages_of(batch)).losses) for rows in updates)
            if updater.layout.fallback:
                raise TrainingError(updater.layout.fallback)
            return loss

        return step

    def old(self) -> Step:
        """The old step, without the divergence from the base."""
        trainer = OldTrainer(self.policy.model, divergence=False)

        def step(batch: Batch) -> float:
            self.policy.recompute(False)
            self.policy.model.zero_grad(set_to_none=True)
            return trainer.accumulate(batch, advantages_of(batch))

        return step

    def loss_and_gradient(self, step: Step, batch: Batch) -> tuple[float, np.ndarray]:
        """Loss of a step, and its gradient as one vector in float64."""
        loss = step(batch)
        return loss, gradient_of(self.policy.parameters())


class Arms(Steps):
    """Both steps of a model with random weights, or of a given one."""

    def __init__(
        self,
        shape: Shape,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        rank: int = 16,
        model: Path | None = None,
    ) -> None:
        """`model`: folder of a model of this shape; None: random weights."""
        self.shape, self.device, self.rank = shape, torch.device(device), rank
        settings = TrainingSettings(
            lora_rank=rank,
            device="cuda" if self.device.type == "cuda" else "cpu",
            dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        )
        super().__init__(Policy(model or model_of(shape, device=str(device), dtype=dtype), settings), settings)

    def batch(self, case: Case, seed: int = 0) -> Batch:
        """A batch of `case` in the vocabulary of the model."""
        return made_up_batch(case, vocabulary=self.shape.vocabulary, seed=seed)


def gradient_of(parameters: Iterable[torch.nn.Parameter]) -> np.ndarray:
    """The gradients as one vector in float64."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return np.concatenate([gradient.double().flatten().cpu().numpy() for gradient in gradients])


def update_rows(batch: Batch, settings: TrainingSettings) -> list[list[int]]:
    """The rows of each update of a step, as `Updater.updates` splits them: prefixes are shared within an update only."""
    return [rows for rows in share_rows(batch, settings.updates_per_step) if rows]


def advantages_of(batch: Batch) -> np.ndarray:
    """float32 [rows]: the returns, which are not zero, so every row has a gradient."""
    return batch.returns.astype(np.float32)


def relative_error(one: np.ndarray, other: np.ndarray) -> float:
    """Norm of the difference over the norm of `other`."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
