"""What one process computes of a work: of an update, and of a forward without gradient. Those of several processes are joined."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

_GAUGE_TYPES = {"batch_row": np.int64} | dict.fromkeys(("in_thought", "clipped_low", "clipped_high", "left_out"), np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """Figures of an update's branching tokens before its optimiser step. All fields have shape [tokens]."""

    batch_row: npt.NDArray[np.int64]
    """Row of the batch."""
    in_thought: npt.NDArray[np.bool_]
    """True for thought tokens."""
    log_ratio: npt.NDArray[np.float32]
    """log(pi / b), nats; b is always the policy that drew the token, also if the loss has another anchor."""
    entropy: npt.NDArray[np.float32]
    """Entropy of the policy over the legal set, nats."""
    legal_mass: npt.NDArray[np.float32]
    """Unmasked probability of the legal set; NaN if it was not probed."""
    kl: npt.NDArray[np.float32]
    """Divergence from the base model over the legal set, nats; NaN if it was not computed."""
    slope: npt.NDArray[np.float32]
    """Derivative of the update's policy loss by the token's log-probability; NaN if the update has no thought token."""
    clipped_low: npt.NDArray[np.bool_]
    """As in `TokenLoss`."""
    clipped_high: npt.NDArray[np.bool_]
    """As in `TokenLoss`."""
    left_out: npt.NDArray[np.bool_]
    """As in `TokenLoss`."""

    @staticmethod
    def join(parts: "Sequence[Gauges]") -> "Gauges":
        """Concatenate; without parts the result has no tokens."""
        joined: dict[str, Any] = {}
        for each in fields(Gauges):
            nothing = np.empty(0, _GAUGE_TYPES.get(each.name, np.float32))
            joined[each.name] = np.concatenate([nothing, *(getattr(part, each.name) for part in parts)])
        return Gauges(**joined)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """Results of forward and backward of one update. The gradient itself is in the parameters."""

    losses: list[float]
    """Loss of each micro-batch, already divided; their sum is the update's loss."""
    gauges: Gauges
    """Figures of the update's branching tokens."""
    unique_tokens: int
    """As in `Cut`."""
    distil: float = 0.0
    """The part of the loss that lessons have; 0 without lessons."""
    plan_s: float
    """Seconds of planning the micro-batches."""
    forward_s: float
    """Seconds of the forwards, with those of the reference, measured on the host."""
    backward_s: float
    """Seconds of the backwards, measured on the host."""

    @classmethod
    def join(cls, parts: Sequence["Accumulated"]) -> "Accumulated":
        """Join the results of several processes that worked at the same time."""
        return cls(
            losses=[loss for part in parts for loss in part.losses],
            gauges=Gauges.join([part.gauges for part in parts]),
            unique_tokens=sum(part.unique_tokens for part in parts),
            distil=sum(part.distil for part in parts),
            plan_s=max(part.plan_s for part in parts),
            forward_s=max(part.forward_s for part in parts),
            backward_s=max(part.backward_s for part in parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What the present policy says of some rows: B branching tokens, in no certain order."""

    index: np.ndarray
    """int64 [B]: index into the completion positions of the batch."""
    chosen: np.ndarray
    """float32 [B]: log-probability of the drawn token over its legal set, nats."""

    @classmethod
    def join(cls, parts: Sequence["Evaluated"]) -> "Evaluated":
        """Join the results of several micro-batches or processes."""
        return cls(
            index=np.concatenate([np.empty(0, np.int64), *(part.index for part in parts)]),
            chosen=np.concatenate([np.empty(0, np.float32), *(part.chosen for part in parts)]),
        )
