"""Temporary folders for merged weights. A folder is locked while its process lives.

The kernel releases the lock even after kill -9. Each engine that starts removes the folders that are not locked.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "entente-merged-"


class Scratch:
    """A temporary folder of this process, until `close`."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._held = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._held, fcntl.LOCK_EX)
            if self.path.exists():  # another process may have removed it before it was locked
                break
            os.close(self._held)

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


def _sweep(root: Path) -> None:
    """Remove the folders under `root` that no process has locked."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, another user's, or not a folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its process lives
        finally:
            os.close(descriptor)
