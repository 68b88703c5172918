"""Computes the updates of a step: advantages, micro-batches, loss, gradient, and one optimiser step per update.

If loss or gradient is not finite, the optimiser step is skipped. If a micro-batch does not fit into memory, the token budget is
halved and the update computed again, unless processes split the base: none may repeat a forward alone.
"""

import gc
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from entente.telemetry.errors import TrainingError
from entente.training.advantages import advantages_of
from entente.training.losses import policy_loss
from entente.training.micro_batches import MicroBatch, branching_indices, plan
from entente.training.objective import Objective, StepFigures, join_tokens, token_figures
from entente.training.parallel import Peers, on_rank_0
from entente.training.policy import Policy
from entente.training.settings import CPU_TOKENS, GPU_TOKENS, MAX_GRADIENT_NORM, TrainingSettings
from storage.gather import Batch

logger = logging.getLogger("entente.trainer")
LEAST_TOKENS = 256
"""A micro-batch is not halved below this."""
MAX_SKIPPED_UPDATES = 3
"""Consecutive; then the run stops, because the fault is not in one batch."""


class Updater:
    """A policy's optimiser and its updates.

    Attributes:
        tokens: largest number of unique tokens in a micro-batch.
        skipped_in_a_row: updates since the last finite one; saved in checkpoints.
    """

    def __init__(self, policy: Policy, settings: TrainingSettings, peers: Peers | None = None) -> None:
        """Raises InputError for an unusable loss."""
        self.policy = policy
        self._splits_base = peers is not None and settings.fsdp
        self.tokens = settings.token_budget or (GPU_TOKENS if policy.device.type == "cuda" else CPU_TOKENS)
        policy_loss(settings.loss)  # fails now, not in the first step, if the package of the loss is missing
        self._settings = settings
        self.optimiser = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
        self.skipped_in_a_row = 0
        self._peers = peers

    def set_rate(self, step: int) -> float:
        rate = self._settings.rate_at(step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        return rate

    def updates(self, batch: Batch) -> Iterator[StepFigures]:
        """One per minibatch of advantage groups. Raises TrainingError after three non-finite ones in a row."""
        advantages = advantages_of(batch.returns, batch.advantage_groups, self._settings)
        minibatches = share_rows(batch, self._settings.updates_per_step)
        later = [row for rows in minibatches[1:] for row in rows]
        proximal = self._proximal(batch, later) if self._settings.importance_cap else None
        for number, rows in enumerate(minibatches):
            update = self.apply(self.accumulate(batch, rows, advantages, proximal))
            if update.skipped:
                named = batch.decision_ids[rows].tolist()
                logger.warning("update %d is skipped because it is not finite; its decisions: %s", number, named)
            if self.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
                raise TrainingError(
                    f"loss or gradient was not finite in {MAX_SKIPPED_UPDATES} updates in a row: lower training.learning_rate, "
                    "and inspect the decisions that the trainer's log names"
                )
            yield update

    def _proximal(self, batch: Batch, later: Sequence[int]) -> np.ndarray:
        """Log-probabilities before the step, float32 [completion positions]; NaN in the first update: the current policy."""
        proximal = np.full(len(batch.behaviour_logprobs), np.nan, np.float32)
        index, logprobs = self.evaluate(batch, later)
        proximal[index] = logprobs
        return proximal

    def accumulate(
        self, batch: Batch, rows: Sequence[int], advantages: np.ndarray, proximal: np.ndarray | None = None
    ) -> StepFigures:
        """Set the gradients to those of `rows`; `advantages` and `proximal` as in `Objective`."""
        objective = Objective.of(self._settings, batch, rows, advantages, proximal)
        if self._peers is None:
            return self.gradient(objective, rows)
        return StepFigures.join(on_rank_0(self._peers, objective, self.policy.parameters(), self.compute))

    def evaluate(self, batch: Batch, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Without gradient: int64 [B], completion positions of branching tokens, any order; float32 [B], logprobs in nats."""
        objective = Objective.of(self._settings, batch, rows)
        if self._peers is None:
            return self._evaluate(objective, rows)
        return _join(on_rank_0(self._peers, objective, self.policy.parameters(), self.compute))

    def compute(self, objective: Objective, rows: Sequence[int]) -> StepFigures | tuple[np.ndarray, np.ndarray]:
        """This process's part of `accumulate` or `evaluate`."""
        return self._evaluate(objective, rows) if objective.advantages is None else self.gradient(objective, rows)

    def _evaluate(self, objective: Objective, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        parts = []
        with torch.no_grad():
            for micro, counts in self._cut(objective, rows):
                chosen = self.policy.masked_logprobs(micro)["chosen"]
                if counts:
                    parts.append((micro.completion_index, chosen.cpu().numpy()))
        return _join(parts)

    def _cut(self, objective: Objective, rows: Sequence[int]) -> list[tuple[MicroBatch, bool]]:
        """Micro-batches, and whether they count: with a split base, padding ones give every process equally many."""
        batch = objective.batch
        cut = [(micro, True) for micro in plan(batch, rows, self.tokens)]
        if self._peers is None or not self._splits_base:
            return cut
        missing = self._peers.most(len(cut)) - len(cut)
        if not missing:
            return cut
        all_rows = np.asarray(objective.rows, np.int64)
        branching = all_rows[np.unique(branching_indices(batch, all_rows)[1])]
        shortest = branching[np.diff(batch.input_offsets)[branching].argmin()]
        return [*cut, *[(plan(batch, [int(shortest)], self.tokens)[0], False)] * missing]

    def gradient(self, objective: Objective, rows: Sequence[int]) -> StepFigures:
        """On out-of-memory halve `tokens` and retry. Raises TrainingError at the smallest micro-batch."""
        while True:
            try:
                return self._forward_and_backward(objective, rows)
            except torch.OutOfMemoryError as error:
                if self._splits_base or self.tokens <= LEAST_TOKENS:
                    cure = "lower training.token_budget, or " if self._splits_base else "train a smaller model, or "
                    raise TrainingError(
                        f"a micro-batch of {self.tokens} unique tokens does not fit into the memory of {self.policy.device}: "
                        f"{cure}set training.gradient_checkpointing to true"
                    ) from error
            # not in the except block, where the exception keeps its frames' tensors alive
            gc.collect()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.tokens = max(LEAST_TOKENS, self.tokens // 2)
            logger.warning("out of memory: micro-batches now hold at most %d unique tokens", self.tokens)

    def _forward_and_backward(self, objective: Objective, rows: Sequence[int]) -> StepFigures:
        """Does not wait for the device between micro-batches: the host prepares one while another is computed."""
        self.optimiser.zero_grad(set_to_none=True)
        began = time.perf_counter()
        cut = self._cut(objective, rows)
        plan_s = time.perf_counter() - began
        parts, computed, forward_s, backward_s = list[Tensor](), list[tuple[MicroBatch, Tensor]](), 0.0, 0.0
        for micro, counts in cut:
            began = time.perf_counter()
            loss, figures = self._loss(objective, micro)
            forwarded = time.perf_counter()
            (loss if counts else loss * 0).backward()
            if counts:
                parts.append(loss.detach())
                computed.append((micro, figures))
            forward_s, backward_s = forward_s + forwarded - began, backward_s + time.perf_counter() - forwarded
        began = time.perf_counter()
        losses: list[float] = torch.stack(parts).tolist() if parts else []
        backward_s += time.perf_counter() - began
        return StepFigures(
            losses=losses,
            tokens=join_tokens([token_figures(micro, figures) for micro, figures in computed]),
            unique_tokens=sum(micro.tokens for micro, counts in cut if counts),
            plan_s=plan_s,
            forward_s=forward_s,
            backward_s=backward_s,
        )

    def _loss(self, objective: Objective, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        reference = self.policy.reference(micro) if self._settings.kl_weight else None
        return objective.loss(micro, self.policy.masked_logprobs(micro, reference))

    def apply(self, figures: StepFigures) -> StepFigures:
        """Clip, and step unless loss or gradient is not finite; returns the figures with the norm."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT_NORM))
        finite = bool(np.isfinite([figures.loss, norm]).all())
        if finite:
            self.optimiser.step()
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return replace(figures, grad_norm=norm, skipped=not finite)


def _join(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    index, logprobs = zip((np.empty(0, np.int64), np.empty(0, np.float32)), *parts, strict=True)
    return np.concatenate(index), np.concatenate(logprobs)


def share_rows(batch: Batch, shares: int) -> list[list[int]]:
    """At most `shares` minibatches, each of a random share of the advantage groups, whole; each has a branching token.

    The groups come sorted by start group and phase, so dealing them in turn would train one update on all springs and the next on
    all autumns. The draw is the same for equally many groups, so a step can be replayed.
    """
    groups, group_of_row = np.unique(batch.advantage_groups, return_inverse=True)
    drawn = np.array(random.Random(len(groups)).sample(range(len(groups)), len(groups)), np.int64)
    share_of_row = drawn[group_of_row] % shares
    minibatches = (np.flatnonzero(share_of_row == share) for share in range(shares))
    return [rows.tolist() for rows in minibatches if branching_indices(batch, rows)[0].size]
