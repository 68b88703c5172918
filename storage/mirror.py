"""Copies the files of a folder that grow into a bucket, while one process appends to them.

The process holds a lock of this machine meanwhile, so that a reader beside it does not replace the files that it has open.
"""

import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.copies import GROW, is_unchanged, set_etag
from storage.files import POSIX, make_directory
from storage.objects import Objects
from telemetry.errors import EntenteError, InputError
from telemetry.progress import reporter

MIRROR_S = 2.0
"""Seconds between two copies; more where one takes a twentieth of that time."""
_LOCK = ".mirror.lock"


class Mirror:
    """Copies the growing files of a folder into the bucket while somebody appends to them."""

    def __init__(self, objects: Objects, key: str, folder: Path) -> None:
        """`key` is that of the folder. The caller holds its lock."""
        self._objects, self._key, self._folder = objects, key, folder
        self._copied: dict[Path, tuple[int, int]] = {}
        self._etags: dict[Path, str] = {}
        self._busy = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Copy what has changed since the last copy.

        Raises:
            InputError: another process has written one of the files meanwhile.
        """
        with self._busy:
            for file in sorted(self._folder.iterdir()):
                if file.suffix in GROW and not file.name.startswith("."):
                    with suppress(FileNotFoundError):  # it was just renamed, as a file that has grown too long
                        self._copy(file)

    def _copy(self, file: Path) -> None:
        marks = POSIX.marks(file)
        if marks is None or self._copied.get(file) == marks:
            return
        # A copy to which nobody here appends may have grown on another machine: it is left alone.
        if file in self._copied or not is_unchanged(file):
            key, content = f"{self._key}/{file.name}", file.read_bytes()
            if (mine := self._etags.get(file)) is None:
                etag = self._objects.overwrite(key, content)
            else:
                etag = self._objects.update(key, content, mine)
            if etag is None:
                raise InputError(
                    f"another process has written '{file}' since this one did: it works there now, so this one stops"
                )
            self._etags[file] = etag
            set_etag(file, etag, len(content))
        self._copied[file] = marks

    def close(self) -> None:
        """Copy for the last time."""
        self._ended.set()
        self._thread.join()
        try:
            self.flush()
        except (EntenteError, OSError) as error:
            reporter().say(f"the last figures and logs are on this machine alone until the run is resumed here: {error}")

    def _follow(self) -> None:
        pause = MIRROR_S
        while not self._ended.wait(pause):
            began = time.monotonic()
            try:
                self.flush()
            except (EntenteError, OSError) as error:
                reporter().say(f"figures and logs could not be copied into the bucket, and are tried again: {error}")
            pause = max(MIRROR_S, 20 * (time.monotonic() - began))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock during the block; readers that are replacing files are waited for."""
    make_directory(folder)
    with open(folder / _LOCK, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def not_mirrored(folder: Path) -> Iterator[bool]:
    """Keep others from mirroring the folder during the block; yields False if a process of this machine mirrors it."""
    make_directory(folder)
    with open(folder / _LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
