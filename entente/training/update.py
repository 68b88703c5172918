"""Computes the updates of a step: advantages, micro-batches, loss, gradient, and one optimiser step per update.

The loss of an update is divided by constants of the whole update, so it does not depend on how the update is split into
micro-batches. If loss or gradient is not finite, the optimiser step is skipped and the weights do not change.

The number of unique tokens in a micro-batch is a constant, halved while the memory does not hold one: then the update is computed
again. Where several processes split the base it is never halved: they run their forwards together, so none may repeat one alone.
"""

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from entente.telemetry.errors import TrainingError
from entente.training.losses import policy_loss
from entente.training.micro_batches import MicroBatch, branching_counts, plan
from entente.training.objective import Objective, StepFigures, advantages_of, join_tokens
from entente.training.parallel import Peers, lead
from entente.training.policy import Policy
from entente.training.settings import CPU_TOKENS, GPU_TOKENS, MAX_GRADIENT_NORM, TrainingSettings
from storage.gather import Batch
from storage.lesson_shelf import LessonBatch

logger = logging.getLogger("entente.trainer")
Result = TypeVar("Result")
LEAST_TOKENS = 256
"""Below so many unique tokens a micro-batch is not halved."""
MAX_SKIPPED_UPDATES = 3
"""After so many skipped updates in a row the run stops: the fault is then not in one batch."""


class Updater:
    """Owns the optimiser of a policy and computes the updates of a step.

    Attributes:
        policy: the policy that is trained.
        tokens: largest number of unique tokens in a micro-batch.
        optimiser: AdamW; its state is saved in checkpoints.
        skipped_in_a_row: updates since the last finite one; saved in checkpoints.
    """

    def __init__(self, policy: Policy, settings: TrainingSettings, peers: Peers | None = None) -> None:
        """
        Args:
            peers: the processes that share the updates with this one.

        Raises:
            InputError: the loss of the settings cannot be used.
        """
        self.policy = policy
        self._splits_base = peers is not None and settings.split_base
        self.tokens = settings.token_budget or (GPU_TOKENS if policy.device.type == "cuda" else CPU_TOKENS)
        policy_loss(settings.loss)  # fails now, not in the first step, if the package of the loss is missing
        self._settings = settings
        self.optimiser = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
        self.skipped_in_a_row = 0
        self._peers = peers

    def set_rate(self, step: int) -> float:
        """Set the learning rate to that of a step; returns it."""
        rate = self._settings.rate_at(step)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        return rate

    def updates(self, batch: Batch, lessons: LessonBatch | None = None) -> Iterator[StepFigures]:
        """Compute the step's updates one by one, each on its share of the advantage groups and lessons.

        Args:
            lessons: the lessons of the step; None: it has none.

        Raises:
            TrainingError: three updates in a row were not finite.
        """
        advantages = advantages_of(batch.returns, batch.advantage_groups, self._settings)
        parts = self._settings.updates_per_step
        cut = zip(share_rows(batch, parts), share_rows(lessons and lessons.batch, parts), strict=True)
        cut = [(rows, taught) for rows, taught in cut if rows or taught]
        anchors = self._anchors(batch, [row for rows, _ in cut[1:] for row in rows]) if self._settings.importance_cap else None
        for number, (rows, taught) in enumerate(cut):
            update = self.apply(self.accumulate(batch, rows, advantages, anchors, lessons, taught))
            if update.skipped:
                named = batch.decision_ids[rows].tolist()
                logger.warning("update %d is skipped, because it was not finite; its decisions are %s", number, named)
            if self.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
                raise TrainingError(
                    f"loss or gradient was not finite in {MAX_SKIPPED_UPDATES} updates in a row: lower training.learning_rate, "
                    "and inspect the decisions that the trainer's log names"
                )
            yield update

    def _anchors(self, batch: Batch, later: Sequence[int]) -> np.ndarray:
        """Log-probabilities at the beginning of the step, float32 [completion positions]: for the rows of the later updates. NaN
        for the other rows: in the first update the current policy is that of the beginning."""
        anchors = np.full(len(batch.behaviour_logprobs), np.nan, np.float32)
        index, logprobs = self.evaluate(batch, later)
        anchors[index] = logprobs
        return anchors

    def accumulate(
        self,
        batch: Batch,
        rows: Sequence[int],
        advantages: np.ndarray,
        anchors: np.ndarray | None = None,
        lessons: LessonBatch | None = None,
        taught: Sequence[int] = (),
    ) -> StepFigures:
        """Compute the gradient of `rows` of the batch and rows `taught` of the lessons into the parameters, replacing gradients
        from before; `advantages` and `anchors` as in `Objective`."""
        objective = Objective.of(self._settings, batch, rows, advantages, anchors, lessons, taught)
        if self._peers is None:
            return self.gradient(objective, rows, taught)
        return StepFigures.join(lead(self._peers, objective, self.policy.parameters(), self.compute))

    def evaluate(self, batch: Batch, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of the present policy for the branching tokens of `rows` of the batch, without gradient.

        Returns:
            In no certain order: int64 [B], indices into the completion positions of the batch; float32 [B], nats.
        """
        objective = Objective.of(self._settings, batch, rows)
        if self._peers is None:
            return self._evaluate(objective, rows)
        return _join(lead(self._peers, objective, self.policy.parameters(), self.compute))

    def compute(
        self, objective: Objective, rows: Sequence[int], taught: Sequence[int]
    ) -> StepFigures | tuple[np.ndarray, np.ndarray]:
        """This process's part of an update, on some of its rows: see `accumulate` and `evaluate`."""
        return self._evaluate(objective, rows) if objective.advantages is None else self.gradient(objective, rows, taught)

    def _evaluate(self, objective: Objective, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        found = []
        with torch.no_grad():
            for micro, counts in self._cut(objective.batch, objective.rows, rows):
                chosen = self.policy.masked_logprobs(micro)["chosen"]
                if counts:
                    found.append((micro.completion_index, chosen.cpu().numpy()))
        return _join(found)

    def _cut(self, batch: Batch, all_rows: Sequence[int], rows: Sequence[int]) -> list[tuple[MicroBatch, bool]]:
        """Micro-batches of `rows`, and whether they count. Where processes split the base, some count for nothing: they are
        computed because another process has a micro-batch more.

        Args:
            all_rows: the rows of all processes.
        """
        found = [(micro, True) for micro in plan(batch, rows, self.tokens)]
        if self._peers is None or not self._splits_base:
            return found
        missing = self._peers.most(len(found)) - len(found)
        if not missing:
            return found
        branching = np.asarray(all_rows, np.int64)[branching_counts(batch, all_rows) > 0]
        shortest = branching[np.diff(batch.input_offsets)[branching].argmin()]
        return [*found, *[(plan(batch, [int(shortest)], self.tokens)[0], False)] * missing]

    def gradient(self, objective: Objective, rows: Sequence[int], taught: Sequence[int]) -> StepFigures:
        """Compute the gradient of some or all rows of an update, and of its lessons, into the parameters."""
        return self.within_memory(lambda: self._forward_and_backward(objective, rows, taught))

    def within_memory(self, compute: Callable[[], Result]) -> Result:
        """Call `compute`; if memory runs out, halve `tokens` and call it again.

        Args:
            compute: can be repeated after it failed.

        Raises:
            TrainingError: the smallest micro-batch does not fit into memory.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                if self._splits_base or self.tokens <= LEAST_TOKENS:
                    cure = "lower training.token_budget, or " if self._splits_base else "train a smaller model, or "
                    raise TrainingError(
                        f"a micro-batch of {self.tokens} unique tokens does not fit into the memory of {self.policy.device}: "
                        f"{cure}set training.recompute to true"
                    ) from error
            # outside of the block above, where the exception keeps its frames' tensors alive
            gc.collect()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.tokens = max(LEAST_TOKENS, self.tokens // 2)
            logger.warning("out of memory: micro-batches hold %d unique tokens from here on", self.tokens)

    def _forward_and_backward(self, objective: Objective, rows: Sequence[int], taught: Sequence[int]) -> StepFigures:
        """Gradients are zeroed first. Micro-batches of lessons come last, so those of rollouts are the same with and without
        lessons."""
        self.optimiser.zero_grad(set_to_none=True)
        began, lessons = time.perf_counter(), objective.lessons
        drawn = self._cut(objective.batch, objective.rows, rows)
        learned = [] if lessons is None else self._cut(lessons.batch, objective.taught, taught)
        plan_s = time.perf_counter() - began
        tokens, seconds = list[np.ndarray](), np.zeros(2)

        def loss_of_rollouts(micro: MicroBatch, counts: bool) -> Tensor:
            reference = self.policy.reference(micro) if self._settings.kl_weight else None
            loss, figures = objective.of_rollouts(micro, self.policy.masked_logprobs(micro, reference))
            tokens.extend([figures] if counts else [])
            return loss

        def loss_of_lessons(micro: MicroBatch, _: bool) -> Tensor:
            return objective.of_lessons(micro, self.policy.masked_logprobs(micro))

        losses = _backward(drawn, loss_of_rollouts, seconds)
        distil = _backward(learned, loss_of_lessons, seconds)
        return StepFigures(
            losses=losses + distil,
            tokens=join_tokens(tokens),
            unique_tokens=sum(micro.tokens for micro, counts in (*drawn, *learned) if counts),
            distil=sum(distil),
            plan_s=plan_s,
            forward_s=float(seconds[0]),
            backward_s=float(seconds[1]),
        )

    def apply(self, figures: StepFigures) -> StepFigures:
        """Clip the gradient and take the optimiser step, unless loss or gradient is not finite; returns the figures with both."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT_NORM))
        finite = bool(np.isfinite([figures.loss, norm]).all())
        if finite:
            self.optimiser.step()
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        return replace(figures, gradient_norm=norm, skipped=not finite)


def _backward(
    parts: Sequence[tuple[MicroBatch, bool]], loss_of: Callable[[MicroBatch, bool], Tensor], seconds: np.ndarray
) -> list[float]:
    """The losses of micro-batches that count, whose gradients are added to those in the parameters; `seconds`, of forwards and of
    backwards, grow."""
    losses = []
    for micro, counts in parts:
        began = time.perf_counter()
        loss = loss_of(micro, counts)
        forwarded = time.perf_counter()
        (loss if counts else loss * 0).backward()
        if counts:
            losses.append(float(loss.detach()))
        seconds += (forwarded - began, time.perf_counter() - forwarded)
    return losses


def _join(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """What several micro-batches or processes found, in one."""
    index, logprobs = zip((np.empty(0, np.int64), np.empty(0, np.float32)), *parts, strict=True)
    return np.concatenate(index), np.concatenate(logprobs)


def share_rows(batch: Batch | None, shares: int) -> list[list[int]]:
    """Rows of each update of a step: whole advantage groups, or lessons, dealt out in turn. A share is empty if its rows have no
    branching token."""
    if batch is None:
        return [[] for _ in range(shares)]
    found = [np.flatnonzero(batch.advantage_groups % shares == share).tolist() for share in range(shares)]
    return [rows if branching_counts(batch, rows).any() else [] for rows in found]
