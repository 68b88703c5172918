"""Measures how far the log-probabilities of trainer and engine differ on the same tokens, and refuses to start if too far."""

from dataclasses import dataclass

import numpy as np

from entente.telemetry.errors import TrainingError
from entente.training.settings import MISMATCH_MAX, MISMATCH_MEAN_BF16, MISMATCH_P99_BF16
from entente.training.update import Updater
from storage.gather import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Absolute differences of log-probabilities over branching tokens, nats."""

    tokens: int
    mean: float
    p99: float
    largest: float


def measure_mismatch(updater: Updater, batch: Batch) -> Mismatch:
    """Compare stored behaviour log-probabilities with the policy's, computed as in training.

    Raises:
        TrainingError: the batch has no branching token.
    """
    index, logprobs = updater.evaluate(batch, range(len(batch.prompt_lens)))
    gap = np.abs(logprobs - batch.behaviour_logprobs[index])
    if not len(gap):
        raise TrainingError("the newest rows have no branching token to compare trainer and engine on, or are all faulty")
    return Mismatch(tokens=len(gap), mean=float(gap.mean()), p99=float(np.quantile(gap, 0.99)), largest=float(gap.max()))


def check_mismatch(found: Mismatch, version: int, dtype: str) -> None:
    """Refuse a mismatch above the limits for the trainer's number format `dtype`.

    Raises:
        TrainingError: it is above them: mask, temperature, ids or weights of trainer and engine differ.
    """
    if dtype == "float32":
        bad = not found.largest <= MISMATCH_MAX
        rule = f"largest difference {found.largest:.2g} nats, {MISMATCH_MAX:.2g} allowed"
    else:
        bad = not (found.mean <= MISMATCH_MEAN_BF16 and found.p99 <= MISMATCH_P99_BF16)
        allowed = f"{MISMATCH_MEAN_BF16} and {MISMATCH_P99_BF16} allowed"
        rule = f"mean {found.mean:.2g} and p99 {found.p99:.2g} nats, {allowed}"
    if bad:
        raise TrainingError(
            f"trainer and engine disagree on version {version} over {found.tokens} tokens ({rule}): "
            "legal mask, temperature, token ids or weights differ between the two; the run does not start"
        )
