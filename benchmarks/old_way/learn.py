"""The trainer of the old and the new way: from a step's files to a new adapter.

As the old system around `benchmarks.old_trainer`: advantages are standardised in their group, clipped at ten, and standardised
again over the batch; a step has one update; gradients are clipped at ten; the rate is constant. Gradient checkpointing was
switched on there without effect, so nothing is computed again here. With `Way.no_reference` neither trainer has a divergence from
the base in its loss; else both have, with the old weight. Cheaper than the original: no top-100 entropy of every
position, ratios by token instead of sequence, no dropout.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.old_trainer import KL_WEIGHT, OldTrainer
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.trajectories import read
from benchmarks.old_way.ways import Way
from decoding.model_files import eos_token_id
from inference.adapter_check import version_in
from records.policy_version import PolicyVersion
from storage.gather import Batch
from training.policy import Policy
from training.settings import TrainingSettings
from training.update import Updater

MAX_ADVANTAGE, MAX_GRADIENT_NORM = 10.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The result of a step."""

    rolled: int
    """Decisions rolled out for the step."""
    trained: int
    """Decisions it trained on."""
    policy: PolicyVersion


class Learner:
    """Trains a policy step by step."""

    def __init__(self, model: Path, way: Way, settings: TrainingSettings, folder: Path, clock: StageClock) -> None:
        """`folder` holds the trajectories and gets the adapters."""
        self._way, self._folder, self._clock, self._settings = way, folder, clock, settings
        self.policy = Policy(model, settings)
        self._tokenizer, self._eos = Tokenizer.from_file(str(model / "tokenizer.json")), eos_token_id(model)
        weight = 0.0 if way.no_reference else KL_WEIGHT
        self._updater = Updater(self.policy, settings.model_copy(update={"kl_weight": weight, "kl_control": "fixed"}))
        self._trainer = OldTrainer(self.policy.model, recompute=False, divergence=not way.no_reference)

    def learn(self, step: int) -> Learned:
        """Read the trajectories of `step`, train on them and write the new adapter."""
        with self._clock("read"):
            batch, rolled = read(self._way, self._folder, step, self._tokenizer, self._eos)
        with self._clock("train"):
            if len(batch.returns):
                self._update(batch)
        with self._clock("save"):
            adapter = self._folder / "adapters" / f"v{step:06d}"
            adapter.parent.mkdir(parents=True, exist_ok=True)
            self.policy.save_adapter(adapter)
            policy = version_in(adapter, step)
        return Learned(rolled=rolled, trained=len(batch.returns), policy=policy)

    def _update(self, batch: Batch) -> None:
        if self._way.packing:
            for _ in self._updater.updates(batch):
                pass
            return
        self.policy.model.zero_grad(set_to_none=True)
        self._trainer.accumulate(batch, standardise(batch.returns, batch.advantage_groups))
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT_NORM)
        self._updater.optimiser.step()


def standardise(returns: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Old advantages: standardised in each group, clipped, then standardised over all rows."""
    advantages = np.zeros(len(returns))
    for group in np.unique(groups):
        own = groups == group
        advantages[own] = (returns[own] - returns[own].mean()) / max(float(returns[own].std()), 1e-8)
    advantages = np.clip(advantages, -MAX_ADVANTAGE, MAX_ADVANTAGE)
    spread = float(advantages.std())
    return ((advantages - advantages.mean()) / max(spread, 1e-8)).astype(np.float32)
