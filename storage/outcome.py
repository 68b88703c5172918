"""What a step came to: the figures that a replay of it must find again, kept as long as the step's ledger.

Promise: ``ledger/<lineage>/step-000137.json`` appears whole, beside the ledger of the step, once the step's checkpoint stands;
it is written once, and outlives checkpoint and adapter. It has a loss for every micro-batch, so that a replay which differs can
say where it began to.
Never: say what to train on, or be needed to go on with a run.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from storage.files import FILES
from storage.json_files import read_object
from storage.ledger import ledger_path
from storage.runs import RunPaths
from telemetry.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """One optimiser update of a step."""

    loss: float
    """The sum over its micro-batches."""
    gradient_norm: float
    """Before it was clipped."""
    micro_batches: Sequence[float]
    """What each micro-batch added to the loss, in their order; 0 for one without a branching token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step computed, and on what."""

    updates: Sequence[UpdateOutcome]
    """Its optimiser updates, in their order; none if it had nothing to learn from."""
    device: str
    """cpu or cuda."""
    threads: int
    """CPU threads of torch: on another number, sums are taken in another order."""
    torch: str
    """Version of torch."""
    adapter_hash: str = ""
    """Hash of the adapter that was published; empty in a checkpoint, which comes before."""

    @property
    def loss(self) -> float:
        """The mean over its updates, as `train/loss` has it."""
        return sum(update.loss for update in self.updates) / max(1, len(self.updates))

    @property
    def gradient_norm(self) -> float:
        """The largest of its updates, as `train/gradient_norm` has it."""
        return max((update.gradient_norm for update in self.updates), default=0.0)

    @property
    def micro_batches(self) -> list[list[float]]:
        """Losses by update and micro-batch."""
        return [list(update.micro_batches) for update in self.updates]


def outcome_path(paths: RunPaths, lineage: str, step: int) -> Path:
    """Where the outcome of this step lies or will lie."""
    return ledger_path(paths, lineage, step).with_suffix(".json")


def write_outcome(paths: RunPaths, lineage: str, step: int, outcome: Outcome) -> None:
    """Record what ``step`` came to; what is recorded already stands."""
    path = outcome_path(paths, lineage, step)
    if not FILES.exists(path):
        record = {"lineage": lineage, "step": step, **asdict(outcome)}
        FILES.publish(path, lambda aside: aside.write_text(json.dumps(record, indent=1)))


def read_outcome(paths: RunPaths, lineage: str, step: int) -> Outcome | None:
    """What ``step`` came to; None if that is not recorded.

    Raises:
        DataError: the file was altered, or is of another step or lineage.
    """
    path = outcome_path(paths, lineage, step)
    try:
        stored = read_object(path)
        # A file of a version that did not write them is taken at its name.
        of = stored.pop("lineage", lineage), stored.pop("step", step)
        outcome = Outcome(**{**stored, "updates": [UpdateOutcome(**update) for update in stored["updates"]]})
    except FileNotFoundError:
        return None
    except (DataError, TypeError, KeyError) as error:
        raise DataError(f"'{path}' is no outcome of a step ({error}): restore it from a copy") from error
    if of != (lineage, step):
        raise DataError(f"'{path}' is the outcome of step {of[1]} of lineage '{of[0]}': it is a copy or was renamed; remove it")
    return outcome
