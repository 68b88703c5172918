"""A run to play for without a trainer: a copy of the small one, as it stands while it is at work."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from records.policy_version import BASE
from storage.adapters import read_adapter
from storage.control import ControlDesk, read_control
from storage.runs import RunPaths


@pytest.fixture
def run(trained: Any, tmp_path: Path) -> Callable[..., tuple[RunPaths, ControlDesk]]:
    """A copy of the small run, as it would be at work with this version served."""

    def make(version: int = 0) -> tuple[RunPaths, ControlDesk]:
        _, first, _ = trained
        root = tmp_path / "runs"
        for shared in ("_models", "_state_cache"):
            (root / shared).parent.mkdir(exist_ok=True)
            (root / shared).symlink_to(first.root.parent / shared)
        paths = RunPaths(root / "mine")
        shutil.copytree(first.root, paths.root)
        paths.summary.unlink()
        before = read_control(paths)
        desk = ControlDesk(paths, base_model=before.base_model, plays=before.plays, quota=2, max_policy_lag=2)
        _serve(paths, desk, version)
        return paths, desk

    return make


@pytest.fixture
def serve() -> Callable[[RunPaths, ControlDesk, int], None]:
    """Have a run serve a version: `serve(paths, desk, 2)`."""
    return _serve


def _serve(paths: RunPaths, desk: ControlDesk, version: int) -> None:
    desk.serve(read_adapter(paths, version) if version else BASE)
