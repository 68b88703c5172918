"""How the rows of an update are cut into micro-batches: packed, unless something stands against it.

Promise: packed is taken only for models that it covers, and only after one micro-batch of the run's own rows went through both
paths in this process and came out with the same loss and gradient. Otherwise rows are padded, and `fallback` says why.
Never: change a weight, or a gradient that stands.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from storage.gather import Batch
from training.branching import BranchingTokens, branching_counts
from training.packed_forward import attention_kinds
from training.padded_rows import PaddedRows, pad, padded_micro_batches
from training.policy import Policy
from training.settings import TrainingSettings
from training.trie_plan import PackedMicroBatch, plan

logger = logging.getLogger("entente.trainer")
_CHECKED_ROWS = 4
_CHECKED_TOKENS = 4096
"""Padded tokens that the check may take, where its rows are long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTolerance:
    """How far the two paths may be apart."""

    loss: float
    """Nats a branching token."""
    gradient: float
    """Norm of the difference over the norm."""


TOLERANCES = {
    ("cpu", "float32"): LayoutTolerance(loss=1e-6, gradient=1e-5),
    ("cuda", "float32"): LayoutTolerance(loss=1e-4, gradient=1e-3),
    ("cpu", "bfloat16"): LayoutTolerance(loss=0.02, gradient=0.1),
    ("cuda", "bfloat16"): LayoutTolerance(loss=0.05, gradient=0.2),
}
"""In bfloat16 the two paths round in other places: 1e-4 and 2e-2 are usual for a small model, and more for a deep one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """An update's rows as micro-batches."""

    micro_batches: tuple[PackedMicroBatch, ...] | tuple[PaddedRows, ...]
    """Rows without a branching token may be in none of them."""
    raw_tokens: int
    """Tokens of the rows, prompts and completions."""
    unique_tokens: int
    """Tokens that forwards compute, padding left out."""


class Layout:
    """The layout of one policy in one process.

    Attributes:
        packed: rows are packed.
        fallback: why they are not, though the settings ask for it; else empty.
    """

    def __init__(self, policy: Policy, settings: TrainingSettings) -> None:
        self._policy = policy
        self._settings = settings
        self._checked = False
        self.packed = settings.layout == "packed"
        self.fallback = ""
        if self.packed and (reason := policy.uncovered_reason()):
            self._fall_back(reason)

    def cut(self, batch: Batch, rows: Sequence[int], token_budget: int) -> Cut:
        """Micro-batches of `rows`; the first time, after the check, which chooses how the policy attends."""
        if self.packed and not self._checked:
            self._check(batch, rows)
        if self.packed:
            found = plan(batch, rows, token_budget)
            return Cut(micro_batches=found.micro_batches, raw_tokens=found.raw_tokens, unique_tokens=found.unique_tokens)
        tokens = int(np.diff(batch.input_offsets)[list(rows)].sum())
        micro_batches = tuple(padded_micro_batches(batch, rows, self._settings.micro_batch_rows))
        return Cut(micro_batches=micro_batches, raw_tokens=tokens, unique_tokens=tokens)

    def _check(self, batch: Batch, rows: Sequence[int]) -> None:
        """Send a few rows both ways; take the first attention that agrees with padding, or pad."""
        few = _rows_to_check(batch, np.asarray(rows, np.int64))
        if not len(few):
            return  # nothing of this batch is trained on; the next one is asked
        self._checked = True
        padded = self._loss_and_gradient([pad(batch, few)])
        wanted, reasons = self._policy.attention, []
        for kind in attention_kinds(wanted, self._policy.device):
            self._policy.attention = kind
            reason = self._compare_layouts(batch, few, padded)
            if not reason:
                return
            logger.warning("packed attention '%s' is not used: %s", kind, reason)
            reasons.append(f"{kind}: {reason}")
        self._policy.attention = wanted
        self._fall_back("; ".join(reasons))

    def _compare_layouts(self, batch: Batch, few: np.ndarray, padded: tuple[float, torch.Tensor]) -> str:
        """How the packed path parts from the padded one; empty if it does not."""
        try:
            found, gradient = self._loss_and_gradient(plan(batch, few, _CHECKED_TOKENS).micro_batches)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel that does not compile here must not end the run
            logger.warning("the packed forward failed", exc_info=True)
            return f"it failed with {type(error).__name__}"
        allowed = TOLERANCES[self._policy.device.type, self._settings.dtype]
        loss = abs(found - padded[0])
        apart = float((gradient - padded[1]).norm() / padded[1].norm().clamp_min(1e-30))
        if loss <= allowed.loss and apart <= allowed.gradient:
            return ""
        return (
            f"over {len(few)} rows its loss is {loss:.2g} nats off ({allowed.loss:.2g} allowed) and its gradient {apart:.2g} "
            f"({allowed.gradient:.2g} allowed)"
        )

    def _fall_back(self, reason: str) -> None:
        self.packed, self.fallback = False, f"rows are padded, several times slower than packed: {reason}"
        logger.warning(self.fallback)

    def _loss_and_gradient(self, micro_batches: Sequence[BranchingTokens]) -> tuple[float, torch.Tensor]:
        """A mean log-probability and its gradient; tokens weigh by their place in the batch: equal weights could hide a swap."""
        weights = self._policy.parameters()
        total, gradient = 0.0, torch.zeros(sum(weight.numel() for weight in weights), device=self._policy.device)
        count = sum(len(micro.batch_row) for micro in micro_batches)
        for micro in micro_batches:
            share = torch.from_numpy(np.cos(micro.completion_index).astype(np.float32) / count).to(self._policy.device)
            with torch.enable_grad():  # whoever asks first may want none
                loss = (self._policy.masked_logprobs(micro).chosen * share).sum()
            parts = torch.autograd.grad(loss, weights)
            gradient += torch.cat([part.flatten() for part in parts])
            total += float(loss.detach())
        return total, gradient


def _rows_to_check(batch: Batch, rows: np.ndarray) -> np.ndarray:
    """Rows for the check: the first with branching tokens and the last, so that some share a prompt and some do not."""
    branching = rows[branching_counts(batch, rows) > 0]
    few = np.unique(np.concatenate([branching[: _CHECKED_ROWS - 1], branching[-1:]]))
    longest = int(np.diff(batch.input_offsets)[few].max()) if len(few) else 0
    return few[: max(2, _CHECKED_TOKENS // max(1, longest))]
