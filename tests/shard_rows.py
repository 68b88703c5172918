"""Rows of a run's Arrow files, read without any of the code under test."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.runs import RunPaths


def shard_files(paths: RunPaths) -> list[Path]:
    """The published shards, without phases and what is being written."""
    return sorted(file for file in paths.shards.rglob("*.arrow") if file.stem.isdigit())


def read_rows(*files: Path) -> list[dict[str, Any]]:
    found = []
    for file in files:
        with pa.memory_map(str(file)) as source:
            found += pa.ipc.open_file(source).read_all().to_pylist()
    return found
