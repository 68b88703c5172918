"""What is slow to make and never changed: the session's worker processes make it once between them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.files import file_lock

_LONGEST_S = 1200.0


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, in which `make` leaves what is shared; the first process that asks makes it, others wait."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / name
    with file_lock(root / f"{name}.lock", wait_s=_LONGEST_S) as mine:
        assert mine, f"{folder} is made by another process for more than {_LONGEST_S} s"
        if not folder.exists():
            shutil.rmtree(aside := root / f"{name}.part", ignore_errors=True)
            aside.mkdir()
            make(aside)
            aside.rename(folder)
    return folder
