"""Copies of ledgers in checkpoints, and the repair of ledgers before a run is resumed.

A ledger keeps the rows of its step from being trained on again. So each checkpoint has copies of the ledgers whose rows a later
step could still draw. A ledger that is lost or damaged is restored from such a copy. Without one, its rows must be too old to be
drawn, or the run is not resumed. This module removes nothing: a damaged ledger is renamed.
"""

from collections.abc import Mapping
from pathlib import Path

from entente.telemetry.errors import DataError
from storage.adapters import published_versions
from storage.files import folders_in, publish_once, set_aside
from storage.ledger import ledger_path, read_ledger_file, recorded_steps
from storage.runs import CHECKPOINT_NAME, RunPaths, numbers_in
from storage.settings import StorageSettings

CHECKPOINT_MANIFEST = "manifest.json"


def checkpoint_steps(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    found = numbers_in(folders_in(paths.checkpoints), CHECKPOINT_NAME)
    return [step for step in found if (paths.checkpoint(step) / CHECKPOINT_MANIFEST).exists()]


def ledgers_to_copy(paths: RunPaths, step: int, storage: StorageSettings) -> list[Path]:
    """The ledgers whose rows a step after `step` may draw, and that of `step` itself."""
    first = min(step, _first_in_reach(step, storage))
    found = (ledger_path(paths, each) for each in range(max(1, first), step + 1))
    return [path for path in found if path.exists()]


def check_ledgers(paths: RunPaths, storage: StorageSettings) -> None:
    """Check that no step of a resumed run could train a second time on the rows of a lost or damaged ledger.

    Raises:
        DataError: it could, and no checkpoint has a copy of the ledger.
    """
    done, faults = _faults(paths)
    for step, (path, why) in faults.items():
        if _first_in_reach(done, storage) <= step <= done and _copy_of(paths, path) is None:
            newest = max(published_versions(paths), default=0)
            raise DataError(
                f"the ledger of step {step} is needed, so that its rows are not trained on again, and no checkpoint has a copy: "
                f"{path} is {why}. Restore it from a copy of the run, or begin a new run with these weights, "
                f"which trains on rows of its own: entente train --run NAME --init-from {paths.root.name}:{newest}"
            )


def restore_ledgers(paths: RunPaths, storage: StorageSettings) -> list[str]:
    """Restore lost and damaged ledgers from checkpoints; returns a sentence for each of them."""
    check_ledgers(paths, storage)
    done, faults = _faults(paths)
    return [_repair(paths, step, path, why, trained=step <= done) for step, (path, why) in faults.items()]


def _repair(paths: RunPaths, step: int, path: Path, why: str, *, trained: bool) -> str:
    copy = _copy_of(paths, path)
    if path.exists():
        set_aside(path)
    if copy is not None:
        content = copy.read_bytes()
        publish_once(path, lambda aside: aside.write_bytes(content))
        return f"the ledger of step {step} is restored from checkpoint {copy.parent.name}: {path} was {why}"
    if trained:
        return f"step {step} cannot be replayed, and its rows are too old for another step: {path} was {why}"
    return f"step {step} chooses its rows again, because it was not trained: {path} was {why}"


def _first_in_reach(step_done: int, storage: StorageSettings) -> int:
    """The first step whose rows are new enough for the step after `step_done`. The rows of step s are of versions before s."""
    return step_done - storage.max_policy_lag + 1


def _faults(paths: RunPaths) -> tuple[int, Mapping[int, tuple[Path, str]]]:
    """The last trained step, and the lost or damaged ledgers: step -> its path, and "missing" or "damaged"."""
    done = max([0, *checkpoint_steps(paths), *published_versions(paths)])
    faults = {}
    for step in sorted({*range(1, done + 1), *recorded_steps(paths)}):
        path = ledger_path(paths, step)
        try:
            read_ledger_file(path)
        except DataError:
            faults[step] = (path, "damaged" if path.exists() else "missing")
    return done, faults


def _copy_of(paths: RunPaths, ledger: Path) -> Path | None:
    """A whole copy of a ledger in the newest checkpoint that has one."""
    for step in reversed(checkpoint_steps(paths)):
        copy = paths.checkpoint(step) / ledger.name
        if copy.exists():
            try:
                read_ledger_file(copy)
            except DataError:
                continue
            return copy
    return None
