"""What tests of several commands share."""

import shutil
from pathlib import Path

import pytest

from storage.runs import RunPaths


@pytest.fixture
def copied(trained, tmp_path: Path) -> RunPaths:
    """A copy of the run, to be spoilt, beside its model."""
    _, paths, _ = trained
    shutil.copytree(paths.root.parent / "_models", tmp_path / "runs" / "_models")
    return RunPaths(shutil.copytree(paths.root, tmp_path / "runs" / "copy"))
