"""A run for the tests of storage, and rows to put in it."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from storage.runs import RunPaths
from tests.storage import make_rows


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails in a test, so nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def rows() -> ModuleType:
    """The makers of rows."""
    return make_rows


@pytest.fixture
def rng() -> random.Random:
    return random.Random(20240229)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "a").create()


@pytest.fixture
def publish(paths: RunPaths, rows: Any, rng: random.Random) -> Callable[..., Any]:
    """Publish random rows of some start groups; returns the shard and its decisions."""
    from storage.shards import publish_shard

    def publish_groups(start_groups: range, producer: str = "p0", **given: Any) -> Any:
        decisions, phases = make_rows.make_shard_rows(rng, start_groups, producer, **given)
        return publish_shard(paths, producer, start_groups[0], decisions, phases, {"code": "test"}), decisions

    return publish_groups
