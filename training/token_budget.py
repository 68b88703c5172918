"""How many unique tokens a micro-batch may have: as many as fit.

On a GPU one warm forward and backward is measured, and what it took for a token is scaled to the memory that is free; on a CPU,
where a larger micro-batch gains nothing, it is a fixed number. Where memory runs out all the same the budget is halved and the
update begun again: its loss is divided by constants of the whole update, so the result is the same.

    budget = headroom * (free bytes) / (bytes a token took at its peak)

Never: plan, or compute a loss.
"""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from telemetry.errors import TrainingError
from training.settings import CPU_TOKENS, TrainingSettings

logger = logging.getLogger("entente")
Result = TypeVar("Result")

WARM_TOKENS = 2048
"""Budget of the warm micro-batch that is measured: large enough to show its slope, small enough to fit wherever training does."""
LEAST, MOST = 256, 32_768
HEADROOM = 0.8
"""Share of the free memory that is planned with: the allocator leaves gaps, and the optimiser's state comes later."""


class TokenBudget:
    """The budget of one policy on one device.

    Attributes:
        tokens: unique tokens of a micro-batch, now.
        calibrated: it is known; else a warm micro-batch is to be measured first.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self._device = device
        self.calibrated = bool(settings.token_budget) or device.type != "cuda"
        self.tokens = settings.token_budget or (CPU_TOKENS if self.calibrated else WARM_TOKENS)

    def calibrate(self, warm: Callable[[int], int]) -> None:
        """Measure and choose, if that has not been done.

        Args:
            warm: does one forward and backward in at most so many tokens, and says in how many.
        """
        if self.calibrated:
            return
        self.calibrated = True  # memory that runs out even here is met by halving
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        tokens = self.within_memory(warm)
        taken = torch.cuda.max_memory_allocated(self._device) - before
        _release(self._device)
        self.tokens = tokens_that_fit(free_bytes(self._device), taken / max(tokens, 1))
        logger.info("a micro-batch holds %d unique tokens: one took %.0f kB", self.tokens, taken / max(tokens, 1) / 1e3)

    def within_memory(self, work: Callable[[int], Result]) -> Result:
        """`work` with the budget as it is; where memory runs out, again with half of it.

        Args:
            work: leaves nothing behind when it fails, or begins by removing it.

        Raises:
            TrainingError: the smallest budget is too large.
        """
        while True:
            try:
                return work(self.tokens)
            except torch.OutOfMemoryError:
                pass  # halved below, where the failure no longer holds on to the tensors of its frames
            self._halve()

    def _halve(self) -> None:
        _release(self._device)
        if self.tokens <= LEAST:
            raise TrainingError(
                f"a micro-batch of {self.tokens} unique tokens does not fit into the memory of {self._device}: set "
                "training.recompute to true, or train a smaller model"
            )
        self.tokens = max(LEAST, self.tokens // 2)
        logger.warning("out of memory: micro-batches hold %d unique tokens from here on", self.tokens)


def tokens_that_fit(free: float, bytes_each: float) -> int:
    """The budget for so much free memory, in whole 256s, within reason."""
    fitting = HEADROOM * free / max(bytes_each, 1.0)
    return int(min(MOST, max(LEAST, fitting // 256 * 256)))


def free_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on a CUDA device: what no one has, and what its own cache holds."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
