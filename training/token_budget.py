"""The number of unique tokens in a micro-batch: as many as fit into memory.

On a GPU the peak memory of one forward and backward is measured at two sizes. The line through both has a fixed part and bytes
per token. It gives the budget that takes HEADROOM of the free memory:

    fixed + (bytes per token) * budget = HEADROOM * (free bytes)

A line is not enough: a dense mask grows with the square of the tokens. So a micro-batch of that budget, or of all tokens if there
are fewer, is tried. If it takes more than that share of the memory, the line through it and the micro-batch before gives the
budget; between two sizes the peak is not above their line, because it never grows more slowly with more tokens.

On a CPU, where larger micro-batches are not faster, the budget is constant. So it is where several processes split the base:
they run their forwards together, so none may repeat one alone. If memory runs out, the budget is halved and the work
is repeated, at first not below the largest size that worked. The result is the same, because the loss is divided by constants of
the whole update.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from telemetry.errors import TrainingError
from training.settings import CPU_TOKENS, TrainingSettings

logger = logging.getLogger("entente")
Result = TypeVar("Result")

WARM_TOKENS = 2048
"""Budget of the larger measured micro-batch; the smaller one has half. Large enough to show the memory per token, small enough to
fit on any GPU in use."""
LEAST, MOST = 256, 32_768
HEADROOM = 0.8
"""Share of the free memory that is used: the allocator leaves gaps, and the optimiser allocates its state later."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One micro-batch that was computed."""

    tokens: int
    peak: int
    """Bytes at the peak, above what was allocated before."""


class TokenBudget:
    """The budget of one policy on one device.

    Attributes:
        tokens: largest number of unique tokens in a micro-batch.
        calibrated: False until a micro-batch was measured, if one has to be.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device, *, fixed: bool = False) -> None:
        """`fixed`: the budget never changes; running out of memory is an error."""
        self._device = device
        self.tokens = settings.token_budget or (CPU_TOKENS if device.type != "cuda" else WARM_TOKENS)
        self._fixed = fixed
        self.calibrated = fixed or bool(settings.token_budget) or device.type != "cuda"
        self._worked = LEAST

    def calibrate(self, warm: Callable[[int], int]) -> None:
        """Measure micro-batches and set `tokens`, unless that is done already.

        Args:
            warm: runs one forward and backward of at most the given number of tokens; returns the number of tokens.

        Raises:
            TrainingError: the smallest budget does not fit into memory.
        """
        if self.calibrated:
            return
        self.calibrated = True
        # The first micro-batch compiles kernels and allocates gradients, which later ones find. Its peak is not used.
        self.within_memory(warm)
        full = self.tokens
        self.tokens = max(LEAST, full // 2)
        small = self._measure(warm)
        self.tokens = full
        large = self._measure(warm)
        usable = HEADROOM * free_bytes(self._device)
        self.tokens = max(self._worked, tokens_that_fit(usable, small, large))
        tried = self._measure(warm) if self.tokens > self._worked else large
        if tried.peak > usable:
            self.tokens = min(self.tokens, max(large.tokens, tokens_that_fit(usable, large, tried)))
        logger.info(
            "a micro-batch holds %d unique tokens: %d took %.2f GB of %.2f GB",
            self.tokens,
            tried.tokens,
            tried.peak / 1e9,
            usable / 1e9,
        )

    def _measure(self, warm: Callable[[int], int]) -> Measured:
        """Compute a micro-batch of the budget, halved until it fits."""
        _release(self._device)
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        tokens = self.within_memory(warm)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        _release(self._device)
        self._worked = max(self._worked, min(tokens, self.tokens))
        return Measured(tokens, int(peak))

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
            except torch.OutOfMemoryError as error:
                if self._fixed:
                    raise TrainingError(
                        f"a micro-batch of {self.tokens} unique tokens does not fit into the memory of {self._device} beside a "
                        "part of the base: lower training.token_budget, or set training.recompute to true"
                    ) from error
                # halved outside of this block, where the exception no longer keeps its frames' tensors alive
            self._halve()

    def _halve(self) -> None:
        _release(self._device)
        if self.tokens <= LEAST:
            raise TrainingError(
                f"a micro-batch of {self.tokens} unique tokens does not fit into the memory of {self._device}: set "
                "training.recompute to true, or train a smaller model"
            )
        # A size that worked may fail later, because another process took memory.
        floor = self._worked if self.tokens > self._worked else LEAST
        self.tokens = max(floor, self.tokens // 2)
        logger.warning("out of memory: micro-batches hold %d unique tokens from here on", self.tokens)


def tokens_that_fit(usable: float, small: Measured, large: Measured) -> int:
    """The budget whose peak is `usable` bytes on the line through two micro-batches: a multiple of 256 from LEAST to MOST.

    If the two do not differ enough to give a line, as in a batch of few tokens, the whole peak of `large` counts per token.
    """
    slope = (large.peak - small.peak) / max(large.tokens - small.tokens, 1)
    if slope <= 0 or large.tokens < 1.25 * small.tokens:
        slope = max(large.peak, 1) / max(large.tokens, 1)
    fixed = large.peak - slope * large.tokens
    return int(min(MOST, max(LEAST, (usable - fixed) / slope // 256 * 256)))


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on a CUDA device: free memory and torch's own cache, within the share of the
    card that this process may take."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    most = min(free + torch.cuda.memory_reserved(device), int(share * total))
    return most - torch.cuda.memory_allocated(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
