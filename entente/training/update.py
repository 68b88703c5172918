"""Computes the updates of a step: advantages, micro-batches, loss, gradient, and one optimiser step per update.

The loss of an update is divided by constants of the whole update, so it does not depend on how the update is split into
micro-batches. If loss or gradient is not finite, the optimiser step is skipped and the weights do not change.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from entente.telemetry.errors import TrainingError
from entente.training.advantages import advantages_of
from entente.training.branching import (
    BranchingTokens,
    branching_counts,
    branching_decisions,
    branching_tokens,
    probed_tokens,
    thought_tokens,
)
from entente.training.choose_loss import policy_loss
from entente.training.layout import Cut, Layout
from entente.training.losses import DrawnTokens
from entente.training.masked_logprobs import MaskedLogprobs
from entente.training.objective import Objective
from entente.training.padded_rows import PaddedRows
from entente.training.parallel import ForwardWork, Peers, UpdateWork, lead
from entente.training.policy import Policy
from entente.training.results import Accumulated, Evaluated, Gauges
from entente.training.settings import MAX_GRADIENT_NORM, TrainingSettings
from entente.training.step_metrics import Update
from entente.training.token_budget import TokenBudget
from entente.training.trie_plan import PackedMicroBatch
from storage.gather import Batch
from storage.lesson_shelf import LessonBatch
from storage.outcome import UpdateOutcome

logger = logging.getLogger("entente.trainer")
MAX_SKIPPED_UPDATES = 3
"""After so many skipped updates in a row the run stops: the fault is then not in one batch."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A micro-batch of an update or a forward."""

    micro: PackedMicroBatch | PaddedRows
    lessons: LessonBatch | None = None
    """The lessons that it is of; None: it is of rollouts."""
    idle: bool = False
    """It counts for nothing: it is computed because a process that splits the base with this one has a micro-batch more."""


class Updater:
    """Owns the optimiser of a policy and computes the updates of a step.

    Attributes:
        policy: the policy that is trained.
        layout: splits rows into micro-batches.
        budget: largest size of a packed micro-batch.
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
        self.layout = Layout(policy, settings)
        self._splits_base = peers is not None and settings.split_base
        self.budget = TokenBudget(settings, policy.device, fixed=self._splits_base)
        policy_loss(settings.loss)  # fails now, not in the first step, if the package of the loss is missing
        self._settings = settings
        self.optimiser = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, betas=(0.9, 0.999), weight_decay=0.0)
        self.skipped_in_a_row = 0
        self._peers = peers

    def updates(self, batch: Batch, lessons: LessonBatch | None = None) -> Iterator[Update]:
        """Compute the step's updates one by one, each on its share of the advantage groups and lessons.

        Args:
            lessons: the lessons of the step; None: it has none.

        Raises:
            TrainingError: three updates in a row were not finite.
        """
        advantages = advantages_of(batch.returns, batch.advantage_groups, self._settings)
        shares = self._settings.updates_per_step
        cut = zip(share_rows(batch, shares), share_rows(lessons and lessons.batch, shares), strict=True)
        cut = [(rows, taught) for rows, taught in cut if rows or taught]
        anchors = self._anchors(batch, [rows for rows, _ in cut[1:] if rows]) if self._settings.importance_cap else None
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

    def _anchors(self, batch: Batch, later: Sequence[Sequence[int]]) -> np.ndarray:
        """Log-probabilities at the beginning of the step, float32 [completion positions]: for the rows of the later updates. NaN
        for the other rows: in the first update the current policy is that of the beginning."""
        anchors = np.full(len(batch.behaviour_logprobs), np.nan, np.float32)
        for share in later:
            found = self.evaluate(batch, share)
            anchors[found.index] = found.chosen
        return anchors

    def cut(self, batch: Batch, rows: Sequence[int]) -> Cut:
        """Micro-batches of `rows`, in the layout and budget of training."""
        return self.layout.cut(batch, rows, self.budget.tokens)

    def accumulate(
        self,
        batch: Batch,
        rows: Sequence[int],
        advantages: np.ndarray,
        anchors: np.ndarray | None = None,
        lessons: LessonBatch | None = None,
        taught: Sequence[int] = (),
    ) -> Accumulated:
        """Compute the gradient of `rows` of the batch and rows `taught` of the lessons into the parameters, replacing gradients
        from before.

        Args:
            advantages: float32 [rows of the batch].
            anchors: float32 [completion positions of the batch], log-probabilities of the policy in the ratio's denominator; NaN
                means the current policy. None: the ratio is taken against the policies that drew the tokens.
        """
        work = UpdateWork(
            batch=batch,
            rows=rows,
            advantages=advantages,
            anchors=anchors,
            objective=self._objective(batch, rows, lessons, taught),
            lessons=lessons,
            taught=taught,
        )
        if self._peers is None:
            return self.gradient(work, rows, taught)
        return Accumulated.join(lead(self._peers, work, self.policy.parameters(), self.compute))

    def evaluate(self, batch: Batch, rows: Sequence[int]) -> Evaluated:
        """What the present policy says of `rows` of the batch, without gradient."""
        work = ForwardWork(batch=batch, rows=rows)
        if self._peers is None:
            return self._evaluate(work, rows)
        return Evaluated.join(lead(self._peers, work, self.policy.parameters(), self.compute))

    def compute(self, work: UpdateWork | ForwardWork, rows: Sequence[int], taught: Sequence[int]) -> Accumulated | Evaluated:
        """This process's part of a work: see `gradient` and `evaluate`."""
        return self._evaluate(work, rows) if isinstance(work, ForwardWork) else self.gradient(work, rows, taught)

    def _evaluate(self, work: ForwardWork, rows: Sequence[int]) -> Evaluated:
        self.layout.check(work.batch, work.rows)
        parts = [_Part(micro) for micro in self.cut(work.batch, rows).micro_batches]
        found = []
        with torch.no_grad():
            for part in self._in_step(work.batch, work.rows, parts):
                micro = part.micro
                if not len(micro.batch_row):
                    continue
                logprobs = self.policy.masked_logprobs(micro)
                if not part.idle:
                    found.append(Evaluated(index=micro.completion_index, chosen=logprobs.chosen.cpu().numpy()))
        return Evaluated.join(found)

    def _in_step(
        self, batch: Batch, rows: Sequence[int], parts: Sequence[_Part], lessons: LessonBatch | None = None
    ) -> list[_Part]:
        """The parts, and idle ones until each process that splits the base has as many forwards.

        Args:
            rows: all rows of the work, the same in each process.
            lessons: the lessons of which `batch` is; None: it is of rollouts.
        """
        if self._peers is None or not self._splits_base:
            return list(parts)
        forwards = sum(len(part.micro.batch_row) > 0 for part in parts)
        missing = self._peers.most(forwards) - forwards
        if not missing:
            return list(parts)
        branching = np.asarray(rows, np.int64)[branching_counts(batch, rows) > 0]
        shortest = branching[np.diff(batch.input_offsets)[branching].argmin()]
        idle = _Part(self.cut(batch, [int(shortest)]).micro_batches[0], lessons, idle=True)
        return [*parts, *[idle] * missing]

    def gradient(self, work: UpdateWork, rows: Sequence[int], taught: Sequence[int] = ()) -> Accumulated:
        """Compute the gradient of some or all rows of an update, and of its lessons, into the parameters. Gradients are zeroed
        first. Micro-batches of lessons come last, so those of rollouts are the same with and without lessons."""

        self.layout.check(work.batch, work.rows)
        if work.lessons is not None:
            self.layout.check(work.lessons.batch, work.taught)

        def cut_all() -> tuple[list[_Part], list[_Part], int]:
            """Micro-batches of rollouts and of lessons, and their unique tokens."""
            cuts = [self.cut(work.batch, rows)]
            drawn = self._in_step(work.batch, work.rows, [_Part(micro) for micro in cuts[0].micro_batches])
            learned: list[_Part] = []
            if work.lessons is not None:
                cuts.append(self.cut(work.lessons.batch, taught))
                learned = [_Part(micro, work.lessons) for micro in cuts[1].micro_batches]
                learned = self._in_step(work.lessons.batch, work.taught, learned, work.lessons)
            return drawn, learned, sum(cut.unique_tokens for cut in cuts)

        def all_micro_batches() -> Accumulated:
            self.optimiser.zero_grad(set_to_none=True)
            began = time.perf_counter()
            drawn, learned, unique_tokens = cut_all()
            plan_s = time.perf_counter() - began
            losses, gauges, forward_s, backward_s = self._forward_and_backward([*drawn, *learned], work)
            return Accumulated(
                losses=losses,
                gauges=gauges,
                unique_tokens=unique_tokens,
                distil=sum(losses[sum(not part.idle for part in drawn) :]),
                plan_s=plan_s,
                forward_s=forward_s,
                backward_s=backward_s,
            )

        return self.budget.within_memory(all_micro_batches)

    def _forward_and_backward(self, parts: Sequence[_Part], work: UpdateWork) -> tuple[list[float], Gauges, float, float]:
        """Losses, gauges of rollouts, and seconds of forwards and backwards; gradients are added to those in the parameters."""
        losses, gauges, forward_s, backward_s = [], [], 0.0, 0.0
        for part in parts:
            micro, lessons = part.micro, part.lessons
            if len(micro.batch_row) == 0:
                losses.append(0.0)
                continue
            began = time.perf_counter()
            if lessons is not None:
                weights = torch.from_numpy(lessons.weights[micro.batch_row]).to(self.policy.device)
                loss = work.objective.distil(self.policy.masked_logprobs(micro), weights)
            else:
                reference = self.policy.reference(micro) if self._settings.kl_weight else None
                found = self.policy.masked_logprobs(micro, reference)
                drawn = self._drawn(micro, found, work.advantages, work.anchors)
                loss, seen = work.objective.add(drawn, found, micro.batch_row, micro.in_thought)
                if not part.idle:
                    gauges.append(seen)
            forwarded = time.perf_counter()
            (loss * 0 if part.idle else loss).backward()
            if not part.idle:
                losses.append(float(loss.detach()))
            forward_s += forwarded - began
            backward_s += time.perf_counter() - forwarded
        return losses, Gauges.join(gauges), forward_s, backward_s

    def _objective(self, batch: Batch, rows: Sequence[int], lessons: LessonBatch | None, taught: Sequence[int]) -> Objective:
        """The loss of an update on `rows` and the rows `taught` of the lessons, with its constants."""
        tokens = branching_tokens(batch, rows)
        of_teacher = 0.0 if lessons is None else float(branching_counts(lessons.batch, taught) @ lessons.weights[list(taught)])
        return Objective(
            settings=self._settings,
            branching_tokens=tokens,
            thought_tokens=thought_tokens(batch, rows),
            decisions=branching_decisions(batch, rows),
            probed_tokens=probed_tokens(batch, rows),
            teacher_tokens=of_teacher,
        )

    def _drawn(
        self, micro: BranchingTokens, found: MaskedLogprobs, advantages: np.ndarray, anchors: np.ndarray | None
    ) -> DrawnTokens:
        """The input of the policy loss for a micro-batch."""
        device, anchor = self.policy.device, None
        if anchors is not None:
            stored = torch.from_numpy(anchors[micro.completion_index]).to(device)
            anchor = torch.where(torch.isfinite(stored), stored, found.chosen.detach())
        return DrawnTokens(
            logprobs=found.chosen,
            behaviour=torch.from_numpy(micro.behaviour).to(device),
            advantages=torch.from_numpy(advantages[micro.batch_row]).to(device),
            decisions=torch.from_numpy(micro.batch_row).to(device),
            anchor=anchor,
        )

    def apply(self, accumulated: Accumulated) -> Update:
        """Clip the gradient and take the optimiser step, unless loss or gradient is not finite."""
        loss = sum(accumulated.losses)
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT_NORM))
        finite = bool(np.isfinite([loss, norm]).all())
        if finite:
            self.optimiser.step()
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        outcome = UpdateOutcome(loss=loss, gradient_norm=norm, micro_batches=accumulated.losses)
        return Update(computed=accumulated, outcome=outcome, skipped=not finite, distil_loss=accumulated.distil)


def share_rows(batch: Batch | None, shares: int) -> list[list[int]]:
    """Rows of each update of a step: whole advantage groups, or lessons, dealt out in turn. A share is empty if its rows have no
    branching token."""
    if batch is None:
        return [[] for _ in range(shares)]
    found = [np.flatnonzero(batch.advantage_groups % shares == share).tolist() for share in range(shares)]
    return [rows if branching_tokens(batch, rows) else [] for rows in found]
