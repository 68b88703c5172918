"""Folders for merged weights that outlive no process: one is locked while its owner lives, and what lost its owner is removed.

The lock is the kernel's, so a kill -9 frees it; the next engine that starts on the machine sweeps.
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
            if self.path.exists():  # or another's sweep came between making and holding it
                break
            os.close(self._held)

    def close(self) -> None:
        """Remove the folder; nothing the second time."""
        if self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


def _sweep(root: Path) -> None:
    """Remove our folders under `root` that nobody holds."""
    for folder in root.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, another user's, or no folder
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
