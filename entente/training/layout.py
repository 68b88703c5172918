"""Splits the rows of an update into micro-batches, packed or padded, that the memory holds.

Packed micro-batches need a model that the packed forward covers. Before the first use, a few rows of the run are computed in both
layouts, and losses and gradients must agree. Otherwise rows are padded, and `fallback` says why. This module does not change
weights or the gradients in the parameters.

The number of unique tokens in a packed micro-batch is a constant, halved while the memory does not hold one: then the work is
repeated. The result is the same, because the loss is divided by constants of the whole update. Where several processes split the
base it is never halved: they run their forwards together, so none may repeat one alone.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from entente.telemetry.errors import TrainingError
from entente.training.branching import BranchingTokens, PaddedRows, branching_counts, pad, padded_micro_batches
from entente.training.policy import Policy
from entente.training.settings import CPU_TOKENS, GPU_TOKENS, TrainingSettings
from entente.training.trie_plan import PackedMicroBatch, plan
from storage.gather import Batch

logger = logging.getLogger("entente.trainer")
Result = TypeVar("Result")
MicroBatch = PackedMicroBatch | PaddedRows
LEAST_TOKENS = 256
"""Below so many unique tokens the budget is not halved."""
MICRO_BATCH_ROWS = 32
"""Decisions of a padded forward; the loss does not depend on it."""
_CHECKED_ROWS = 4
_CHECKED_TOKENS = 4096
"""Largest number of padded tokens in the check; with long rows it uses fewer of them."""


TOLERANCES = {
    ("cpu", "float32"): (1e-5, 1e-4),
    ("cuda", "float32"): (1e-4, 1e-3),
    ("cpu", "bfloat16"): (0.02, 0.1),
    ("cuda", "bfloat16"): (0.05, 0.2),
}
"""By device and dtype, the largest differences between the packed and the padded layout: of the loss, nats per branching token,
and of the gradient, the norm over that of the padded one. In float32 on a CPU a tiny model rounds to 1e-6 of the gradient, the 30
blocks of SmolLM2 to 1.1e-5. In bfloat16 the two layouts round differently: 1e-4 and 2e-2 are usual for a small model, more for a
deep one."""


class Layout:
    """The layout of one policy in one process.

    Attributes:
        packed: whether rows are packed.
        fallback: why rows are padded although the settings ask for packed; else empty.
        tokens: largest number of unique tokens in a packed micro-batch.
    """

    def __init__(self, policy: Policy, settings: TrainingSettings, *, fixed: bool = False) -> None:
        """`fixed`: `tokens` never changes; running out of memory is an error."""
        self._policy = policy
        self._settings = settings
        self._checked = False
        self._fixed = fixed
        self.tokens = settings.token_budget or (GPU_TOKENS if policy.device.type == "cuda" else CPU_TOKENS)
        self.packed = settings.layout == "packed"
        self.fallback = ""
        if self.packed and (reason := policy.uncovered_reason()):
            self._fall_back(reason)

    def check(self, batch: Batch, rows: Sequence[int]) -> None:
        """Run the check on a few of these rows, unless it was run."""
        if self.packed and not self._checked:
            self._check(batch, rows)

    def cut(self, batch: Batch, rows: Sequence[int]) -> tuple[MicroBatch, ...]:
        """Micro-batches of `rows`; rows without a branching token may be left out. The first call runs the check."""
        self.check(batch, rows)
        if self.packed:
            return plan(batch, rows, self.tokens)
        return tuple(padded_micro_batches(batch, rows, MICRO_BATCH_ROWS))

    def within_memory(self, work: Callable[[], Result]) -> Result:
        """Call `work`; if memory runs out, halve the budget and call it again.

        Args:
            work: can be repeated after it failed.

        Raises:
            TrainingError: the smallest budget does not fit into memory.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if self._fixed or self.tokens <= LEAST_TOKENS:
                    cure = "lower training.token_budget, or " if self._fixed else "train a smaller model, or "
                    raise TrainingError(
                        f"a micro-batch of {self.tokens} unique tokens does not fit into the memory of {self._policy.device}: "
                        f"{cure}set training.recompute to true"
                    ) from error
            # outside of the block above, where the exception keeps its frames' tensors alive
            gc.collect()
            if self._policy.device.type == "cuda":
                torch.cuda.empty_cache()
            self.tokens = max(LEAST_TOKENS, self.tokens // 2)
            logger.warning("out of memory: micro-batches hold %d unique tokens from here on", self.tokens)

    def _check(self, batch: Batch, rows: Sequence[int]) -> None:
        """Use the padded layout if the results of the packed one differ."""
        few = _rows_to_check(batch, np.asarray(rows, np.int64))
        if not len(few):
            return  # no row has a branching token; check with the next batch
        self._checked = True
        if reason := self._compare_layouts(batch, few, self._loss_and_gradient([pad(batch, few)])):
            self._fall_back(reason)

    def _compare_layouts(self, batch: Batch, few: np.ndarray, padded: tuple[float, torch.Tensor]) -> str:
        """How the packed layout differs from the padded one, in words; empty if they agree."""
        try:
            found, gradient = self._loss_and_gradient(plan(batch, few, _CHECKED_TOKENS))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel that does not compile here must not end the run
            logger.warning("the packed forward failed", exc_info=True)
            return f"it failed with {type(error).__name__}"
        loss_allowed, gradient_allowed = TOLERANCES[self._policy.device.type, self._settings.dtype]
        loss_difference = abs(found - padded[0])
        gradient_difference = float((gradient - padded[1]).norm() / padded[1].norm().clamp_min(1e-30))
        if loss_difference <= loss_allowed and gradient_difference <= gradient_allowed:
            return ""
        return (
            f"over {len(few)} rows its loss is {loss_difference:.2g} nats off ({loss_allowed:.2g} allowed) and its gradient "
            f"{gradient_difference:.2g} ({gradient_allowed:.2g} allowed)"
        )

    def _fall_back(self, reason: str) -> None:
        self.packed, self.fallback = False, f"rows are padded, several times slower than packed: {reason}"
        logger.warning(self.fallback)

    def _loss_and_gradient(self, micro_batches: Sequence[BranchingTokens]) -> tuple[float, torch.Tensor]:
        """A weighted mean of log-probabilities, and its gradient [adapter weights].

        Each token has another weight: with equal weights, swapped tokens would not be noticed.
        """
        weights = self._policy.parameters()
        total, gradient = 0.0, torch.zeros(sum(weight.numel() for weight in weights), device=self._policy.device)
        count = sum(len(micro.batch_row) for micro in micro_batches)
        for micro in micro_batches:
            share = torch.from_numpy(np.cos(micro.completion_index).astype(np.float32) / count).to(self._policy.device)
            with torch.enable_grad():  # the caller may have disabled gradients
                loss = (self._policy.masked_logprobs(micro).chosen * share).sum()
            parts = torch.autograd.grad(loss, weights)
            gradient += torch.cat([part.flatten() for part in parts])
            total += float(loss.detach())
        return total, gradient


def _rows_to_check(batch: Batch, rows: np.ndarray) -> np.ndarray:
    """Rows for the check: the first few with branching tokens, which share a prompt prefix, and the last, which may not."""
    branching = rows[branching_counts(batch, rows) > 0]
    few = np.unique(np.concatenate([branching[: _CHECKED_ROWS - 1], branching[-1:]]))
    longest = int(np.diff(batch.input_offsets)[few].max()) if len(few) else 0
    return few[: max(2, _CHECKED_TOKENS // max(1, longest))]
