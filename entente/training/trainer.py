"""One step: choose rows, write the ledger, compute the updates, save a checkpoint, publish the adapter.

A thread saves and publishes a step from copies on the host, while the next step may train:

    trainer     choose 1, ledger 1, train 1, copy │ choose 2, ledger 2, train 2, copy │ choose 3, ...
    its writer                                    │ checkpoint 1, adapter 1           │ checkpoint 2, adapter 2

- The ledger of a step is on disk before its forward pass.
- The checkpoint of a step is complete on disk before its adapter is published, so no row is ever sampled by a version that a
  resume could not restore.
- The trainer copies the state of a step only after the step before it is published. So a kill leaves at most two ledgers without
  a checkpoint, and their steps are repeated on the same rows: neither version was published, and nothing relies on them.
- After an error of the writer no step is saved: `saved` and the next step raise it.

After a kill the trainer resumes from the newest intact checkpoint, repeats steps that have a ledger, and publishes a version that
was not published yet. The flow decides when to train.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from entente.records.policy_version import BASE, PolicyVersion, TrainedStep
from entente.telemetry.errors import DataError, InputError, TrainingError
from entente.training.checkpoint import Checkpoint, StateCopy, load_checkpoint, save_checkpoint
from entente.training.mismatch import check_mismatch, measure_mismatch
from entente.training.objective import StepFigures
from entente.training.parallel import Peers
from entente.training.policy import Policy, find_faults
from entente.training.settings import KEEP_CHECKPOINTS, MISMATCH_ROWS, TrainingSettings, settings_hash
from entente.training.step_metrics import (
    lag_zero_metrics,
    masked_metrics,
    rate_metrics,
    selection_metrics,
    update_metrics,
)
from entente.training.update import Updater
from storage.adapters import publish_adapter
from storage.arrow_files import metadata_of
from storage.files import set_aside
from storage.gather import Batch, ShardDamaged
from storage.index import Index
from storage.ledger import Eligible, count_start_groups, ledgers_to_copy, read_ledger, recorded_steps, write_ledger
from storage.order_outcomes import order_outcomes
from storage.retention import RetentionSettings, RunAge, retire
from storage.runs import RunPaths, checkpoint_steps
from storage.settings import StorageSettings
from storage.update_log import LoggedUpdate, UpdateLog, write_update_log

logger = logging.getLogger("entente.trainer")


class Trainer:
    """Policy and optimiser of one run, resumed from its newest intact checkpoint.

    Attributes:
        step_done: the newest step, which is the policy version held.
        saving: its publication; done at once before the first step.
        set_aside: a sentence per damaged checkpoint that was skipped.
    """

    def __init__(
        self,
        paths: RunPaths,
        policy: Policy,
        training: TrainingSettings,
        storage: StorageSettings,
        *,
        peers: Peers | None = None,
        engine_dtype: str = "float32",
        order_ends: Collection[int] = (),
    ) -> None:
        """Restore the newest intact checkpoint, and publish its version if needed.

        Args:
            engine_dtype: the engine's number format.
            order_ends: ids of the tokens that end an order's line, for the figures by kind of order; empty: without these.

        Raises:
            InputError: other settings, or another release.
            DataError: a damaged file.
        """
        self._paths = paths
        self._policy = policy
        self._settings = training
        self._storage = storage
        self._engine_dtype, self._order_ends = engine_dtype, order_ends
        self._updater = Updater(policy, training, peers)
        self._processes = 1 if peers is None else peers.size
        self._settings_hash = settings_hash(training)
        self.step_done = 0
        self.metrics_done: dict[str, float] = {}
        self.saving = Future[PolicyVersion]()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self.set_aside: list[str] = []
        state = self._restore()
        self._index = Index(paths, storage, seed=training.seed, oldest=self.step_done - storage.max_policy_lag)
        if state is not None:
            if state.settings_hash != self._settings_hash:
                raise InputError(
                    f"checkpoint '{paths.checkpoint(state.step)}' was made under other training settings than the current ones: "
                    f"resume with the run's own settings, or start another run from it with --init-from {paths.root.name}:"
                    f"{state.step}"
                )
            self.saving.set_result(self._publish(state))
        else:
            self.saving.set_result(BASE)
        self._to_repeat = [step for step in recorded_steps(paths) if step > self.step_done]

    def _restore(self) -> Checkpoint | None:
        for step in reversed(checkpoint_steps(self._paths)):
            try:
                state = load_checkpoint(self._paths, step, self._policy, self._updater.optimiser)
            except DataError as error:
                set_aside(self._paths.checkpoint(step))
                self.set_aside.append(str(error))
                continue
            self.step_done, self.metrics_done = state.step, state.metrics
            self._updater.skipped_in_a_row = state.skipped_in_a_row
            return state
        return None

    def resume_point(self) -> TrainedStep:
        return TrainedStep(published=self.saved(), metrics=self.metrics_done, set_aside=tuple(self.set_aside))

    def saved(self) -> PolicyVersion:
        """Wait until the newest step is published. Raises the error of its writer."""
        return self.saving.result()

    def fresh_rows(self) -> int:
        """Rows that the trainer's version sampled, at most MISMATCH_ROWS."""
        self._index.refresh()
        return self._index.fresh_rows(policy_version=self.step_done, limit=MISMATCH_ROWS).num_rows

    def eligible(self, step: int, start_groups: int) -> Eligible:
        """Rows that a step could use now. A step that will be repeated already has its rows."""
        self._index.refresh()
        counts = self._index.eligible(step, policy_version=self.step_done)
        return replace(counts, start_groups=start_groups) if step in self._to_repeat else counts

    def measure_mismatch(self, begins: bool) -> dict[str, float]:
        """As metrics, on the newest rows of this version. Raises TrainingError if there are none, or if the run `begins` and the
        limit is exceeded."""
        self._index.refresh()
        rows = self._index.fresh_rows(policy_version=self.step_done, limit=MISMATCH_ROWS)
        if rows.num_rows == 0:
            raise TrainingError(f"no rows of policy version {self.step_done} to compare trainer and engine on")
        _, batch, _ = self._without_faulty_rows(rows, self._index.gather(rows))
        mismatch = measure_mismatch(self._updater, batch, self._settings.dtype, self._engine_dtype)
        if begins:
            check_mismatch(mismatch, self.step_done)
        return mismatch.metrics()

    def step(self, step: int, start_groups: int) -> dict[str, float]:
        """Train on at most `start_groups` start groups, or as the ledger says, and begin to publish version `step`, for which
        `saved` waits. Returns metrics.

        Raises:
            Exception: the former step could not be saved.
            TrainingError: not the next step, another trainer holds it, or three updates in a row were not finite.
            DataError: a repeated step's ledger or a row is missing or damaged.
        """
        if step != self.step_done + 1:
            raise TrainingError(f"step {step} cannot be trained: the next step is {self.step_done + 1}")
        began = time.perf_counter()
        if step in self._to_repeat:
            rows, batch = self._gather_recorded(step)
            counts: Mapping[str, int] = {}
        else:
            rows, counts, batch = self._choose_and_gather(step, start_groups)
            self._record(step, rows)
        selected = time.perf_counter()
        rows, batch, refused = self._without_faulty_rows(rows, batch)
        rate = self._updater.set_rate(step)
        updates = list(self._updater.updates(batch))
        updated = time.perf_counter()
        metrics = update_metrics(updates) | lag_zero_metrics(updates, batch, self.step_done)
        metrics |= self._masked_metrics(updates, batch, rows)
        metrics |= selection_metrics(rows, counts, batch)
        metrics |= {"train/start_groups": float(count_start_groups(rows))}
        metrics |= {"train/refused_shards": float(len(self._index.refused))}
        metrics |= {"train/refused_rows": float(refused)}
        metrics |= {"train/select_s": selected - began, "train/update_s": updated - selected}
        metrics |= {"train/learning_rate": rate}
        metrics |= rate_metrics(metrics) | self._policy.memory_metrics()
        self._save(step, metrics, self._update_log(updates))
        self.step_done = step
        return metrics | {"train/save_s": time.perf_counter() - updated}

    def retire(self, settings: RetentionSettings) -> int:
        """Delete shards that no step can use, if over budget; returns the bytes freed."""
        self.saved()  # which shards are needed follows from the checkpoints
        self._index.refresh()
        return retire(self._paths, self._index.newest_versions, RunAge.of(self._paths, self._storage), settings)

    def _without_faulty_rows(self, rows: pa.Table, batch: Batch) -> tuple[pa.Table, Batch, int]:
        """The rest of their advantage groups goes too, because its mean would be wrong. Also the number of faulty rows."""
        faults = find_faults(batch, *self._policy.row_limits)
        for row, why in faults.items():
            logger.warning("skipping decision %d and its group: %s", batch.decision_ids[row], why)
        if not faults:
            return rows, batch, 0
        out, groups = np.isin(np.arange(len(batch.returns)), list(faults)), batch.advantage_groups
        out |= (groups >= 0) & np.isin(groups, groups[out])
        sound = rows.filter(pa.array(~out))
        return sound, self._index.gather(sound), len(faults)

    def _choose_and_gather(self, step: int, start_groups: int) -> tuple[pa.Table, dict[str, int], Batch]:
        """Gather before the ledger is written, so that it never names a damaged row; choose again without a damaged shard."""
        while True:
            self._index.refresh()
            rows, counts = self._index.select_batch(step, policy_version=self.step_done, start_groups=start_groups)
            if (groups := count_start_groups(rows)) < start_groups:
                logger.info("step %d has only %d of %d start groups to train on", step, groups, start_groups)
            try:
                return rows, counts, self._index.gather(rows)
            except ShardDamaged as error:
                logger.warning("step %d selects rows again: %s", step, error)

    def _record(self, step: int, rows: pa.Table) -> None:
        about = {"policy_version": str(self.step_done), "settings_hash": self._settings_hash}
        if not write_ledger(self._paths, step, rows, about):
            raise TrainingError(
                f"another trainer already holds step {step} of '{self._paths.root.name}': "
                "two trainers cannot share a run; stop one"
            )

    def _gather_recorded(self, step: int) -> tuple[pa.Table, Batch]:
        """From the step's ledger; raises DataError if rows are missing or damaged."""
        rows = read_ledger(self._paths, step)
        if rows is None:
            raise DataError(f"the ledger of step {step} is missing from '{self._paths.ledger}': restore it from a copy")
        if "distil_targets" in metadata_of(rows):
            raise DataError(
                f"step {step} also trained on distillation targets, which this release cannot read: use the release that wrote it"
            )
        try:
            return rows, self._index.gather(rows)
        except DataError as error:
            raise DataError(f"step {step} cannot be repeated on the rows of its ledger: {error}") from error

    def _masked_metrics(self, updates: Sequence[StepFigures], batch: Batch, rows: pa.Table) -> dict[str, float]:
        if not self._order_ends:
            return {}
        try:
            return masked_metrics(updates, batch, order_outcomes(rows, self._paths.shards), self._order_ends)
        except DataError as error:  # the phases are not trained on
            logger.warning("the masked share by kind of order is missing: %s", error)
            return {}

    def _save(self, step: int, metrics: dict[str, float], update_log: UpdateLog) -> None:
        self.saved()
        state = Checkpoint(
            step=step,
            settings_hash=self._settings_hash,
            skipped_in_a_row=self._updater.skipped_in_a_row,
            metrics=metrics,
            update_log=update_log,
        )
        copied = StateCopy.of(self._policy, self._updater.optimiser)
        self.saving = self._writer.submit(self._write, state, copied, ledgers_to_copy(self._paths, step, self._storage))

    def _write(self, state: Checkpoint, copied: StateCopy, ledgers: Sequence[Path]) -> PolicyVersion:
        save_checkpoint(self._paths, state, copied, KEEP_CHECKPOINTS, ledgers)
        return self._publish(state)

    def _publish(self, state: Checkpoint) -> PolicyVersion:
        published = publish_adapter(self._paths, state.step, self._paths.checkpoint(state.step))
        if state.update_log is not None:
            update_log = replace(state.update_log, adapter_hash=published.adapter_hash)
            write_update_log(self._paths, state.step, update_log)
        return published

    def _update_log(self, updates: Sequence[StepFigures]) -> UpdateLog:
        recorded = [LoggedUpdate(loss=each.loss, grad_norm=each.grad_norm, micro_batches=each.losses) for each in updates]
        return UpdateLog(
            updates=recorded,
            device=self._policy.device.type,
            threads=torch.get_num_threads(),
            processes=self._processes,
            torch=torch.__version__,
        )
