"""Where the files of one run lie, and how a folder, or a file that may be replaced, gets its name (storage/files.py: all others).

Promise: whatever bears a final name is whole and on disk. Content is written aside under a name that no
reader considers (a leading dot, ``.tmp`` at the end), synced, then named in one step, and the folder is
synced after it.
Never: change a published file in place. A reader may hold it memory-mapped, and a truncated mapping kills the
reader.
"""

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage.files import make_directory, name_aside, sync_directory, sync_file
from telemetry.errors import DataError, InputError

CACHE_FOLDER, MODEL_FOLDER = "_state_cache", "_models"
"""Beside the runs: state caches, and models made on the spot."""
LATEST = "latest"
"""In the place of a run's name: the one that wrote a figure last, or began last. No run bears it."""
_LONGEST_NAME = 100  # files that carry it in their own names stay within the 255 bytes of common file systems
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The folders and files of one run."""

    root: Path
    """The run's own folder, runs/<name>."""

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger"

    @property
    def index(self) -> Path:
        return self.root / "index"

    @property
    def retired(self) -> Path:
        return self.root / "retired"

    @property
    def archive(self) -> Path:
        return self.root / "archive"

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def workers(self) -> Path:
        return self.root / "workers.jsonl"

    @property
    def worker_log(self) -> Path:
        return self.root / "workers.log.jsonl"

    @property
    def devices(self) -> Path:
        return self.root / "devices.jsonl"

    @property
    def alerts(self) -> Path:
        return self.root / "alerts.jsonl"

    @property
    def control(self) -> Path:
        return self.root / "control.json"

    @property
    def producers(self) -> Path:
        return self.root / "producers"

    @property
    def recovery(self) -> Path:
        return self.root / "recovery.json"

    @property
    def scores(self) -> Path:
        return self.root / "scores"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def trainer_lock(self) -> Path:
        return self.root / ".trainer.lock"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def trainer_log(self) -> Path:
        return self.root / "trainer.log"

    def adapter(self, version: int) -> Path:
        """Folder of the adapter published as policy ``version``."""
        return self.adapters / f"v{version:06d}"

    def checkpoint(self, step: int) -> Path:
        """Folder of the trainer's whole state after ``step``."""
        return self.checkpoints / f"step_{step:06d}"

    def create(self) -> "RunPaths":
        """Make the folders that do not exist yet, and return these paths."""
        for folder in (self.shards, self.ledger, self.adapters, self.checkpoints, self.scores):
            make_directory(folder)
        return self


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it may become a folder's name: no producer or lineage steps out of the run."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise InputError(
            f"{what} {name[:_LONGEST_NAME]!r} cannot name a folder; use letters, digits, '_', '-' and '.', "
            f"at most {_LONGEST_NAME} of them, and begin with a letter or digit."
        )
    return name


def check_run_name(name: str) -> str:
    """Return ``name`` if a run may bear it.

    Raises:
        InputError: it cannot name a folder, or stands for the latest run.
    """
    if name == LATEST:
        raise InputError(f"a run cannot be named '{LATEST}', which stands for the run that was at work last: choose another name")
    return check_name(name, "run")


def runs_in(runs_root: Path) -> list[RunPaths]:
    """The runs under ``runs_root``, the one that was at work last at the end; a folder without settings is left out."""
    found = []
    for folder in runs_root.iterdir() if runs_root.is_dir() else ():
        if not folder.name.startswith(("_", ".")) and (paths := RunPaths(folder)).settings.is_file():
            found.append((last_written(paths), folder.name, paths))
    return [paths for _, _, paths in sorted(found, key=lambda each: each[:2])]


def last_written(paths: RunPaths) -> float:
    """When the run began, went on, or wrote a figure last, in seconds since the epoch."""
    return max(file.stat().st_mtime for file in (paths.settings, paths.metrics) if file.is_file())


def resolve_run(runs_root: Path, run: str) -> str:
    """The run that is meant: itself, or for 'latest' the one under ``runs_root`` that was at work last and can be read.

    Raises:
        InputError: there is no run yet, or a folder bears that name and either could be meant.
    """
    if run != LATEST:
        return run
    runs = runs_in(runs_root)
    if any(paths.root.name == LATEST for paths in runs):
        raise InputError(
            f"'{runs_root / LATEST}' bears the name that stands for the run that was at work last: rename that folder"
        )
    whole = (paths.root.name for paths in reversed(runs) if _has_whole_settings(paths))
    if (name := next(whole, None)) is None:
        raise InputError(
            f"there is no run in '{runs_root}' yet: begin one with `entente train`, or name the folder with --runs-root"
        )
    return name


def _has_whole_settings(paths: RunPaths) -> bool:
    try:
        return isinstance(json.loads(paths.settings.read_bytes()), dict)
    except (OSError, ValueError):
        return False


@contextmanager
def held(lock: Path, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold an exclusive lock on the file ``lock`` for the length of the block; False if another process has it.

    It is the kernel's (flock), so it ends with the process that holds it, however that ends. It binds processes of one
    machine; what binds those of several is the ledger.
    """
    until = time.monotonic() + wait_s
    while True:
        make_directory(lock.parent)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        mine = _try_lock(handle, until)
        if not mine or _names(lock, handle):
            break
        os.close(handle)  # who held it removed the file: a lock on that one would bind nobody who comes later
    try:
        yield mine
    finally:
        os.close(handle)


def _names(path: Path, handle: int) -> bool:
    """Whether `path` is still the name of the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _try_lock(handle: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)


def set_aside(path: Path) -> Path:
    """Rename what is damaged to a name that no reader considers, and return that; nothing of it is lost."""
    aside = path.with_name(f".{path.name}.damaged-{secrets.token_hex(4)}")
    os.rename(path, aside)
    sync_directory(path.parent)
    return aside


def durable_write(path: Path, content: bytes) -> None:
    """Replace the content of ``path``; after a crash it holds the old or the new, never a mixture."""
    temp = name_aside(path)
    try:
        temp.write_bytes(content)
        sync_file(temp)
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)  # a full disk must not be filled further by what could not be finished
    sync_directory(path.parent)


def publish_directory(temp_dir: Path, final_dir: Path) -> None:
    """Sync everything below ``temp_dir`` and rename it to ``final_dir``, which must not exist."""
    for folder, _, files in os.walk(temp_dir):
        for file in files:
            sync_file(Path(folder, file))
        sync_directory(Path(folder))
    # rename would quietly replace an empty folder, hence the look before; a full one it refuses by itself
    if final_dir.exists():
        raise DataError(f"{final_dir} exists and is never overwritten; remove it, or use another number.")
    try:
        os.rename(temp_dir, final_dir)
    except OSError as error:
        if not final_dir.exists():
            raise
        raise DataError(f"{final_dir} was published by another process meanwhile; only one of the two may go on.") from error
    sync_directory(final_dir.parent)
