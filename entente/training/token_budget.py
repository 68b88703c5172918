"""The number of unique tokens in a micro-batch.

It is a constant, halved while the memory does not hold a micro-batch: then the work is repeated. The result is the same, because
the loss is divided by constants of the whole update. Where several processes split the base it is never halved: they run their
forwards together, so none may repeat one alone.
"""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from entente.telemetry.errors import TrainingError
from entente.training.settings import CPU_TOKENS, GPU_TOKENS, TrainingSettings

logger = logging.getLogger("entente")
Result = TypeVar("Result")

LEAST = 256


class TokenBudget:
    """The budget of one policy on one device.

    Attributes:
        tokens: largest number of unique tokens in a micro-batch.
    """

    def __init__(self, settings: TrainingSettings, device: torch.device, *, fixed: bool = False) -> None:
        """`fixed`: the budget never changes; running out of memory is an error."""
        self._device, self._fixed = device, fixed
        self.tokens = settings.token_budget or (GPU_TOKENS if device.type == "cuda" else CPU_TOKENS)

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
                if self._fixed or self.tokens <= LEAST:
                    cure = "lower training.token_budget, or " if self._fixed else "train a smaller model, or "
                    raise TrainingError(
                        f"a micro-batch of {self.tokens} unique tokens does not fit into the memory of {self._device}: {cure}set "
                        "training.recompute to true"
                    ) from error
            # outside of the block above, where the exception keeps its frames' tensors alive
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self.tokens = max(LEAST, self.tokens // 2)
            logger.warning("out of memory: micro-batches hold %d unique tokens from here on", self.tokens)
