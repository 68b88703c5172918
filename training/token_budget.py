"""The number of unique tokens in a micro-batch: as many as fit into memory.

On a GPU the peak memory of one forward and backward is measured. On a CPU, where larger micro-batches are not faster, the budget
is constant. If memory runs out, the budget is halved and the update is repeated. The result is the same, because the loss is
divided by constants of the whole update.

    budget = headroom * (free bytes) / (peak bytes per token)
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
"""Budget of the measured micro-batch: large enough to show the memory per token, small enough to fit on any GPU in use."""
LEAST, MOST = 256, 32_768
HEADROOM = 0.8
"""Share of the free memory that is used: the allocator leaves gaps, and the optimiser allocates its state later."""


class TokenBudget:
    """The budget of one policy on one device.

    Attributes:
        tokens: largest number of unique tokens in a micro-batch.
        calibrated: False until a micro-batch was measured, if one has to be.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device) -> None:
        self._device = device
        self.calibrated = bool(settings.token_budget) or device.type != "cuda"
        self.tokens = settings.token_budget or (CPU_TOKENS if self.calibrated else WARM_TOKENS)

    def calibrate(self, warm: Callable[[int], int]) -> None:
        """Measure a micro-batch and set `tokens`, unless that is done already.

        Args:
            warm: runs one forward and backward of at most the given number of tokens; returns the number of tokens.

        Raises:
            TrainingError: the smallest budget does not fit into memory.
        """
        if self.calibrated:
            return
        self.calibrated = True
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        tokens = self.within_memory(warm)
        taken = torch.cuda.max_memory_allocated(self._device) - before
        _release(self._device)
        self.tokens = tokens_that_fit(free_bytes(self._device), taken / max(tokens, 1))
        logger.info("a micro-batch holds %d unique tokens: one took %.0f kB", self.tokens, taken / max(tokens, 1) / 1e3)

    def within_memory(self, work: Callable[[int], Result]) -> Result:
        """Call `work` with the budget; if memory runs out, halve the budget and call it again.

        Args:
            work: can be repeated after it failed.

        Raises:
            TrainingError: the smallest budget does not fit into memory.
        """
        while True:
            try:
                return work(self.tokens)
            except torch.OutOfMemoryError:
                pass  # halved outside of this block, where the exception no longer keeps its frames' tensors alive
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
    """The budget for `free` bytes at `bytes_each` bytes per token: a multiple of 256 from LEAST to MOST."""
    fitting = HEADROOM * free / max(bytes_each, 1.0)
    return int(min(MOST, max(LEAST, fitting // 256 * 256)))


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a CUDA device: free memory and torch's own cache."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
