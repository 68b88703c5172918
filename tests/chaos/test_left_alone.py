"""A run left alone: kills that only Prefect's side notices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_ALONE = str(ROOT / "tests" / "chaos" / "left_alone.py")


@pytest.mark.slow
@pytest.mark.vllm
def test_a_run_whose_processes_are_killed_goes_on_by_itself_and_ends_complete(tmp_path: Path):
    words = [
        LEFT_ALONE,
        "--minutes",
        "3",
        "--kinds",
        "flow,trainer,both",
        "--folder",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ok"], done.stderr
    assert [kill["new_process"] for kill in told["kills"]] == [True, True, True]
    assert told["flow_runs"]["COMPLETED"] == 1 and told["unsettled"] == [] and told["processes_left"] == []
