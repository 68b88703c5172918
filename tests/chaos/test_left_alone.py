"""Runs left alone: kills that only Prefect's side notices, and two machines that share nothing but a bucket."""

import json
import os
import shutil
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


def test_a_kind_of_kill_that_there_is_not_is_refused(tmp_path: Path):
    words = [sys.executable, LEFT_ALONE, "--kinds", "flow,meteor"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no kind 'meteor'" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_a_trainer_and_a_producer_that_share_only_a_bucket_end_complete_after_a_fault_of_every_kind(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "chaos" / "two_machines.py"), "--folder", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ok"], done.stderr
    assert len({fault["kind"] for fault in told["faults"]}) == 10 and told["audit"] == "holds"
