"""docs/data-format.md tells every column as it is, and its snippets read shards without Entente."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from storage.arrow_files import SCHEMA_VERSION
from storage.runs import RunPaths
from storage.shards import publish_shard
from tests.shard_rows import read_rows, shard_files
from tests.storage.make_rows import make_decision, make_phase, make_shard_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data-format.md").read_text()


ARROW_ALONE, WITH_DUCKDB = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run_snippet(snippet: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", snippet], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system
def test_the_snippet_reads_a_shard_with_arrow_alone(tmp_path: Path):
    paths = RunPaths(tmp_path / "runs" / "mine").create()
    publish_shard(paths, "local", 0, [make_decision(random.Random(0), start_group=0)], [], {}, next_start_group=1)
    assert run_snippet(ARROW_ALONE, tmp_path).startswith(f"b'{SCHEMA_VERSION}' 1 ")


@pytest.mark.system
def test_the_snippet_asks_shards_and_phases_of_several_producers_with_duckdb(tmp_path: Path):
    paths = RunPaths(tmp_path / "runs" / "mine").create()
    for producer in ("local", "other"):
        decisions, phases = make_shard_rows(random.Random(0), range(1), producer)
        last = [make_phase(fork=fork, phase_index=2, phase="W1901A", orders="{}", results="{}") for fork in range(3)]
        shard = publish_shard(paths, producer, 0, decisions, phases + last, {}, next_start_group=1)
        (paths.shards / producer / ".000001.arrow.tmp").write_bytes(b"cut")
        assert shard
    printed = run_snippet(WITH_DUCKDB, tmp_path)
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    assert [row[:2] for row in rows if row[0] in ("FRANCE", "TURKEY")] == [["FRANCE", "12"], ["TURKEY", "12"]]
    assert rows[-1] == ["18", "6"]


def test_the_last_phase_index_of_a_fork_has_no_orders_and_no_decision(stored_run: RunPaths):
    phases, asked = read_rows(*stored_run.shards.rglob("*.phases.arrow")), read_rows(*shard_files(stored_run))
    last = {(row["start_group"], row["fork"]): row["phase_index"] for row in sorted(phases, key=lambda row: row["phase_index"])}
    assert len(last) > 1 and len(phases) > len(last) and len(asked) > len(last)
    assert all((row["orders"] == "{}") == (row["phase_index"] == last[row["start_group"], row["fork"]]) for row in phases)
    assert all(row["phase_index"] < last[row["start_group"], row["fork"]] for row in asked)
