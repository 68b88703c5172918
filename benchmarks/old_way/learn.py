"""The trainer of either way: from a step's files to a new adapter.

Stands for the old system's trainer around `benchmarks.old_trainer`: advantages standardised in their group, clipped at ten, and
standardised once more over the batch; one update a step; gradients clipped at ten; constant rate. Gradient checkpointing was
asked for and had no effect there, so nothing is computed again here. Kinder than it was: no top-100 entropy over every position,
ratios by token and not by sequence, no dropout.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.old_trainer import OldTrainer
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.trajectories import Learnable, read
from benchmarks.old_way.ways import Way
from decoding.model_files import eos_token_id
from inference.adapter_check import version_in
from records.policy_version import PolicyVersion
from training.policy import Policy
from training.settings import TrainingSettings
from training.update import Updater

MAX_ADVANTAGE, MAX_GRADIENT_NORM = 10.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a step came to."""

    rolled: int
    """Decisions rolled out for it."""
    trained: int
    """Decisions that it trained on."""
    realigned: int
    tokens: int
    """Prompt and completion tokens of those, raw."""
    return_mean: float
    policy: PolicyVersion


class Learner:
    """Holds the policy under training."""

    def __init__(self, model: Path, way: Way, settings: TrainingSettings, folder: Path, clock: StageClock) -> None:
        """`folder`: where trajectories lie and adapters go."""
        self._way, self._folder, self._clock, self._settings = way, folder, clock, settings
        self.policy = Policy(model, settings)
        self._tokenizer, self._eos = Tokenizer.from_file(str(model / "tokenizer.json")), eos_token_id(model)
        self._updater = Updater(self.policy, settings)
        self._trainer = OldTrainer(self.policy.model, recompute=False)

    def learn(self, step: int) -> Learned:
        """Read the trajectories of `step`, train on them, and write the adapter that comes of it."""
        with self._clock("read"):
            found = read(self._way, self._folder, step, self._tokenizer, self._eos)
        with self._clock("train"):
            if len(found.batch.returns):
                self._update(found)
        with self._clock("save"):
            adapter = self._folder / "adapters" / f"v{step:06d}"
            adapter.parent.mkdir(parents=True, exist_ok=True)
            self.policy.save_adapter(adapter)
            policy = version_in(adapter, step)
        return Learned(
            rolled=found.rows,
            trained=len(found.batch.returns),
            realigned=found.realigned,
            tokens=len(found.batch.input_ids),
            return_mean=float(found.batch.returns.mean()) if len(found.batch.returns) else 0.0,
            policy=policy,
        )

    def _update(self, found: Learnable) -> None:
        if self._way.packing:
            for _ in self._updater.updates(found.batch):
                pass
            return
        self.policy.model.zero_grad(set_to_none=True)
        self._trainer.accumulate(found.batch, standardised(found.batch.returns, found.batch.advantage_groups))
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT_NORM)
        self._updater.optimiser.step()


def standardised(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Advantages of old: within the group by mean and deviation, clipped, then over all rows alike."""
    advantages = np.zeros(len(returns))
    for group in np.unique(groups):
        own = groups == group
        advantages[own] = (returns[own] - returns[own].mean()) / max(float(returns[own].std()), 1e-8)
    advantages = np.clip(advantages, -MAX_ADVANTAGE, MAX_ADVANTAGE)
    spread = float(advantages.std())
    return ((advantages - advantages.mean()) / max(spread, 1e-8)).astype(np.float32)
