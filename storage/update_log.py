"""The log of a step's updates: losses and gradient norms that a replay must reproduce, per micro-batch to locate a difference.

`ledger/step-000137.json` is written once, after the step's checkpoint, and outlives checkpoint and adapter. Training does not
need it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from entente.telemetry.errors import DataError
from storage.files import publish_once
from storage.json_files import read_object
from storage.ledger import ledger_path
from storage.runs import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedUpdate:
    loss: float
    """Sum over its micro-batches."""
    grad_norm: float
    """Before clipping."""
    micro_batches: Sequence[float]
    """Loss of each micro-batch, in order; 0 without a branching token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateLog:
    """What a step computed, and with which software."""

    updates: Sequence[LoggedUpdate]
    """In order; empty if the step had nothing to train on."""
    device: str
    threads: int
    """CPU threads of torch; they determine the order of summation."""
    torch: str
    processes: int = 1
    """Trainer processes; they determine the order of summation too."""
    adapter_hash: str = ""
    """Hash of the published adapter; empty in a checkpoint, which is written earlier."""

    @property
    def loss(self) -> float:
        """Mean over the updates, like `train/loss`."""
        return sum(update.loss for update in self.updates) / max(1, len(self.updates))

    @property
    def grad_norm(self) -> float:
        """Maximum over the updates, like `train/grad_norm`."""
        return max((update.grad_norm for update in self.updates), default=0.0)

    @property
    def micro_batches(self) -> list[list[float]]:
        return [list(update.micro_batches) for update in self.updates]


def update_log_path(paths: RunPaths, step: int) -> Path:
    return ledger_path(paths, step).with_suffix(".json")


def write_update_log(paths: RunPaths, step: int, update_log: UpdateLog) -> None:
    path = update_log_path(paths, step)
    if not path.exists():
        record = {"step": step, **asdict(update_log)}
        publish_once(path, lambda aside: aside.write_text(json.dumps(record, indent=1)))


def read_update_log(paths: RunPaths, step: int) -> UpdateLog | None:
    """The log of `step`, if recorded; raises DataError if the file is damaged or belongs to another step."""
    path = update_log_path(paths, step)
    try:
        stored = read_object(path)
        number = stored.pop("step")
        update_log = UpdateLog(**{**stored, "updates": [LoggedUpdate(**update) for update in stored["updates"]]})
    except FileNotFoundError:
        return None
    except (DataError, TypeError, KeyError) as error:
        raise DataError(f"'{path}' is not the log of a step ({error}): restore it from a copy") from error
    if number != step:
        raise DataError(f"'{path}' is the log of step {number}: it is a copy or was renamed; remove it")
    return update_log
