"""Compares trainer and engine log-probabilities on the same tokens: a run whose sides differ too much does not start."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from entente.telemetry.alerts import MISMATCH_MAX, MISMATCH_MEAN
from entente.telemetry.errors import TrainingError
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
        """Whether either side computes in 16 bits: the limit then applies to the mean, else to the maximum."""
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
    """For the start of a run; later the alert `mismatch` only warns, because one sample of tokens does not end a run. Raises
    TrainingError above the limit: mask, temperature, ids, weights or number formats differ."""
    if mismatch.rounded:
        bad = not mismatch.mean <= MISMATCH_MEAN
        rule = f"mean {mismatch.mean:.2g} nats, {MISMATCH_MEAN:g} allowed"
    else:
        bad = not mismatch.largest <= MISMATCH_MAX
        rule = f"largest difference {mismatch.largest:.2g} nats, {MISMATCH_MAX:.2g} allowed"
    if bad:
        raise TrainingError(
            f"trainer and engine disagree on version {version} over {mismatch.tokens} tokens ({rule}): legal mask, temperature, "
            f"token ids or weights differ, the engine does not compute in {mismatch.engine}, or one of "
            "them computes wrongly here (`entente smoke` compares each with transformers); the run does not start"
        )
