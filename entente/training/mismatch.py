"""Compares trainer and engine log-probabilities on the same tokens, and stops the run if they differ too much."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from entente.telemetry.errors import TrainingError
from entente.training.settings import MISMATCH_MAX, MISMATCH_MEAN_BF16, MISMATCH_P99_BF16
from entente.training.update import Updater
from storage.gather import Batch

_SHORT = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Absolute log-probability differences over branching tokens, nats."""

    tokens: int
    mean: float
    p99: float
    largest: float
    trainer: str
    """Number format, such as 'float32'."""
    engine: str

    @classmethod
    def of(cls, gap: np.ndarray, trainer: str, engine: str) -> Self:
        mean, p99, largest = float(gap.mean()), float(np.quantile(gap, 0.99)), float(gap.max())
        return cls(tokens=len(gap), mean=mean, p99=p99, largest=largest, trainer=trainer, engine=engine)

    @property
    def rounded(self) -> bool:
        """Whether either side computes in 16 bits: the limits then apply to mean and 99th percentile, else to the maximum."""
        return self.trainer in _SHORT or self.engine in _SHORT

    def metrics(self) -> dict[str, float]:
        names = ("tokens", "mean", "p99", "largest", "rounded")
        return {f"mismatch/{name}": float(getattr(self, name)) for name in names}


def measure_mismatch(updater: Updater, batch: Batch, trainer: str, engine: str) -> Mismatch:
    """`trainer`, `engine`: number formats. Raises TrainingError if the batch has no branching token."""
    index, logprobs = updater.evaluate(batch, range(len(batch.prompt_lens)))
    gap = np.abs(logprobs - batch.behaviour_logprobs[index])
    if not len(gap):
        raise TrainingError("the newest rows have no branching token to compare trainer and engine on, or are all faulty")
    return Mismatch.of(gap, trainer, engine)


def check_mismatch(mismatch: Mismatch, version: int) -> None:
    """Raises TrainingError above the limits: mask, temperature, ids, weights or number formats differ."""
    if mismatch.rounded:
        bad = not (mismatch.mean <= MISMATCH_MEAN_BF16 and mismatch.p99 <= MISMATCH_P99_BF16)
        allowed = f"{MISMATCH_MEAN_BF16} and {MISMATCH_P99_BF16} allowed"
        rule = f"mean {mismatch.mean:.2g} and p99 {mismatch.p99:.2g} nats, {allowed}"
    else:
        bad = not mismatch.largest <= MISMATCH_MAX
        rule = f"largest difference {mismatch.largest:.2g} nats, {MISMATCH_MAX:.2g} allowed"
    if bad:
        raise TrainingError(
            f"trainer and engine disagree on version {version} over {mismatch.tokens} tokens ({rule}): legal mask, temperature, "
            f"token ids or weights differ, the engine does not compute in {mismatch.engine}, or one of "
            "them computes wrongly here (`entente smoke` compares each with transformers); the run does not start"
        )
