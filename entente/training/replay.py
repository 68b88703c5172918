"""Repeats a past step and compares the result with the record.

A scratch trainer resumes from a copy of the nearest earlier checkpoint, or the initial weights, and repeats the ledgers' steps.
It needs no engine and takes no locks, so the run may be in progress. On a CPU results must be equal bit for bit; on a GPU, or if
several processes made the step, within `TOLERANCES`. It reports the first step, update and micro-batch that differ.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from entente.telemetry.errors import EntenteError, InputError
from entente.telemetry.progress import reporter
from entente.training.policy import Policy, choose_device
from entente.training.settings import TrainingSettings, settings_hash
from entente.training.trainer import Trainer
from storage.adapters import read_adapter
from storage.arrow_files import metadata_of
from storage.files import names_in
from storage.index import open_index
from storage.ledger import ledger_path, read_ledger, recorded_steps
from storage.runs import RunPaths, checkpoint_steps
from storage.settings import StorageSettings
from storage.update_log import LoggedUpdate, UpdateLog, read_update_log


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    loss: float
    """Absolute, per micro-batch: losses are sums of terms of both signs, so a relative bound would mean little."""
    grad_norm: float
    """Relative."""


TOLERANCES = {
    "float32": Tolerance(loss=1e-4, grad_norm=0.01),
    "bfloat16": Tolerance(loss=0.02, grad_norm=0.1),
}
"""By training.dtype; if a repeated step or the replay ran on a GPU, or in several processes. Not measured."""
EXACT = Tolerance(loss=0.0, grad_norm=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    step: int
    what: str
    recorded: str | float
    replayed: str | float
    update: int | None = None
    """From 1; None if the difference is not in one update."""
    micro_batch: int | None = None
    """From 1; None if the difference is not in one micro-batch."""

    @property
    def sentence(self) -> str:
        where = f"micro-batch {self.micro_batch} of " if self.micro_batch else ""
        where += f"update {self.update} of " if self.update else ""
        return f"{where}step {self.step} differs: {self.what} was recorded as {self.recorded} and is {self.replayed} now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    step: int
    start: int
    """Of the checkpoint; 0: initial weights."""
    tolerance: Tolerance
    recorded: UpdateLog
    replayed: UpdateLog | None
    """None if an earlier step differed."""
    difference: Difference | None
    torch: str = torch.__version__


class _Replayer:
    def __init__(
        self,
        paths: RunPaths,
        scratch: RunPaths,
        model: Path,
        training: TrainingSettings,
        storage: StorageSettings,
    ) -> None:
        self._paths, self._scratch = paths, scratch
        self._training, self._storage = training, storage
        self._policy = Policy(model, training)

    def run(self, step: int, recorded: UpdateLog, tolerance: Tolerance) -> Replay:
        trainer = self._resumed(step)
        start = trainer.step_done
        steps = range(start + 1, step + 1)
        logs = [read_update_log(self._paths, number) or recorded for number in steps]
        if any(update_log.processes > 1 or update_log.device != "cpu" for update_log in logs):
            tolerance = TOLERANCES[self._training.dtype]  # several processes, or a GPU, sum in another order
        origin = f"the checkpoint of step {start}" if start else "the first weights"
        reporter().say(f"replaying {_steps(steps)} from {origin}")
        threads = [update_log.threads for update_log in logs]
        returns_difference, difference = self._returns_differ(steps), self._repeat(trainer, steps, threads, tolerance)
        return Replay(
            step=step,
            start=start,
            tolerance=tolerance,
            recorded=recorded,
            replayed=read_update_log(self._scratch, step),
            difference=returns_difference or difference,
        )

    def _resumed(self, step: int) -> Trainer:
        """From the nearest intact checkpoint before `step`, with copies of all files that it needs."""
        for start in [*(kept for kept in reversed(checkpoint_steps(self._paths)) if kept < step), 0]:
            shutil.rmtree(self._scratch.root)
            for folder in (self._scratch.checkpoints, self._scratch.ledger, self._scratch.shards):
                folder.mkdir(parents=True)
            try:
                # Copied, because a trainer deletes old checkpoints.
                if start:
                    shutil.copytree(self._paths.checkpoint(start), self._scratch.checkpoint(start))
            except (FileNotFoundError, shutil.Error):  # a run in progress has just removed it
                continue
            for number in range(start + 1, step + 1):
                _copy_step(self._paths, self._scratch, number)
            trainer = Trainer(self._scratch, self._policy, self._training, self._storage)
            if trainer.step_done == start:
                return trainer
            for sentence in trainer.set_aside:
                reporter().say(f"skipped: {sentence}".replace(str(self._scratch.root), str(self._paths.root)))
        raise InputError(f"no checkpoint of run '{self._paths.root.name}' before step {step} can be used: it cannot be replayed")

    def _returns_differ(self, steps: range) -> Difference | None:
        index = open_index(self._scratch, self._storage)
        rows = index.connection.sql(
            """
            SELECT b.step, b.decision_id, b."return", d."return" FROM batches AS b JOIN decisions AS d USING (shard, "row")
            WHERE b."return" IS DISTINCT FROM d."return" AND b.step BETWEEN $first AND $last ORDER BY b.step, b.place LIMIT 1
            """,
            params={"first": steps[0], "last": steps[-1]},
        ).fetchall()
        if not rows:
            return None
        step, decision, recorded, now = rows[0]
        return Difference(
            step=step, what=f"the return of decision {decision} by storage.reward_weights", recorded=recorded, replayed=now
        )

    def _repeat(self, trainer: Trainer, steps: range, threads: Sequence[int], tolerance: Tolerance) -> Difference | None:
        """`threads`: those of each step, which a resumed run may have changed."""
        if (start := trainer.step_done) and (difference := self._differs(start, tolerance)):
            return difference
        for number, own_threads in zip(steps, threads, strict=True):
            torch.set_num_threads(own_threads)
            trainer.step(number, 0)
            reporter().say(f"step {number} again: adapter {trainer.saved().adapter_hash}")
            reporter().stage("replay", number - start, len(steps))
            if difference := self._differs(number, tolerance):
                return difference
        return None

    def _differs(self, step: int, tolerance: Tolerance) -> Difference | None:
        """With EXACT also compares adapter hashes, if these still exist."""
        recorded, again = read_update_log(self._paths, step), read_update_log(self._scratch, step)
        if recorded is None or again is None:
            return None
        if len(recorded.updates) != len(again.updates):
            what = "the number of updates"
            return Difference(step=step, what=what, recorded=len(recorded.updates), replayed=len(again.updates))
        for number, (then, now) in enumerate(zip(recorded.updates, again.updates, strict=True), start=1):
            if difference := _update_differs(step, number, then, now, tolerance, recorded.processes == again.processes):
                return difference
        if tolerance is EXACT:
            hashes = {"the hash of the adapter": recorded.adapter_hash}
            if self._paths.adapter(step).exists():
                hashes["the hash of the published adapter"] = read_adapter(self._paths, step).adapter_hash
            for what, hashed in hashes.items():
                if hashed != again.adapter_hash:
                    return Difference(step=step, what=what, recorded=hashed, replayed=again.adapter_hash)
        return None


def replay_step(paths: RunPaths, step: int, model: Path, training: TrainingSettings, storage: StorageSettings) -> Replay:
    """Repeat `step` and compare. Raises InputError if it is not done or lacks a file, DataError if one is damaged."""
    recorded = recorded_update_log(paths, step, training)
    on_cpu = {recorded.device, choose_device(training.device).type} == {"cpu"}
    disable_progress_bar()  # loading the model would show one; the steps are reported instead
    before = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory(prefix="entente-replay-") as folder:
            scratch = RunPaths(Path(folder) / "run")
            scratch.root.mkdir()
            try:
                replayer = _Replayer(paths, scratch, model, training, storage)
                return replayer.run(step, recorded, EXACT if on_cpu else TOLERANCES[training.dtype])
            except EntenteError as error:
                error.args = (str(error).replace(str(scratch.root), str(paths.root)),)  # the scratch folder is removed
                raise
    finally:
        torch.set_num_threads(before)


def recorded_update_log(paths: RunPaths, step: int, training: TrainingSettings) -> UpdateLog:
    """Raises InputError if the step is unknown, not done, or trained with other settings."""
    steps, name = recorded_steps(paths), paths.root.name
    if step not in steps:
        if steps and 0 < step < steps[-1]:
            raise InputError(f"the ledger of step {step} is missing from '{paths.ledger}': restore it from a copy")
        there = f"has steps 1 to {steps[-1]}" if steps else "has none yet"
        raise InputError(f"step {step} does not exist: run '{name}' {there}")
    recorded = read_update_log(paths, step)
    if recorded is None:
        why = "is not done yet: try again later" if step == steps[-1] else "has no update log to compare with"
        raise InputError(f"step {step} of run '{name}' {why}")
    rows = read_ledger(paths, step)
    if rows is not None and metadata_of(rows)["settings_hash"] != settings_hash(training):
        raise InputError(
            f"step {step} of run '{name}' was made under other training settings than '{paths.settings}' has now: "
            "restore that file"
        )
    return recorded


def _update_differs(
    step: int, number: int, recorded: LoggedUpdate, again: LoggedUpdate, tolerance: Tolerance, as_many: bool
) -> Difference | None:
    """The first difference, in order of computation. `as_many`: processes in both. A GPU's memory, too, decides how an update is
    cut into micro-batches."""
    counts = len(recorded.micro_batches), len(again.micro_batches)
    cut_alike = as_many and counts[0] == counts[1]
    if not cut_alike and tolerance is EXACT:
        what = "the number of micro-batches"
        return Difference(step=step, update=number, what=what, recorded=counts[0], replayed=counts[1])
    pairs_of_parts = zip(recorded.micro_batches, again.micro_batches, strict=True) if cut_alike else ()
    for place, (then, now) in enumerate(pairs_of_parts, start=1):
        if not _close(then, now, tolerance.loss):
            return Difference(step=step, update=number, micro_batch=place, what="the loss", recorded=then, replayed=now)
    pairs = {
        "the loss": (recorded.loss, again.loss, tolerance.loss * max(1, len(again.micro_batches))),
        "the gradient norm": (
            recorded.grad_norm,
            again.grad_norm,
            tolerance.grad_norm * abs(recorded.grad_norm),
        ),
    }
    for what, (then, now, allowed) in pairs.items():
        if not _close(then, now, allowed):
            return Difference(step=step, update=number, what=what, recorded=then, replayed=now)
    return None


def _close(recorded: float, again: float, allowed: float) -> bool:
    """NaN equals NaN."""
    return recorded == again or (recorded != recorded and again != again) or abs(recorded - again) <= allowed


def _steps(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _copy_step(paths: RunPaths, to: RunPaths, step: int) -> None:
    """Copy the step's ledger, and link its shards, which never change."""
    rows = read_ledger(paths, step)
    if rows is None:
        raise InputError(f"the ledger of step {step} is missing from '{paths.ledger}': restore it from a copy")
    copy = ledger_path(to, step)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ledger_path(paths, step), copy)
    for name in dict.fromkeys(rows["shard"].to_pylist()):
        shard, link = paths.shards / name, to.shards / name
        if not shard.exists():
            raise InputError(f"shard '{shard}', which step {step} trained on, is missing: restore it from a copy")
        link.parent.mkdir(parents=True, exist_ok=True)
        for file in (shard.parent / name for name in names_in(shard.parent) if name.startswith(f"{shard.stem}.")):
            if not (link.parent / file.name).is_symlink():
                (link.parent / file.name).symlink_to(file.resolve())
