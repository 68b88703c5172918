"""A real run whose rollouts come at a known rate, slower than its trainer takes them, is explained as just that."""

import json
import re
import subprocess
from typing import Any

import pytest

from reports.explain import explain_run
from reports.read_run import read_run
from storage.runs import RunPaths
from tests.conftest import Entente

RATE = 2.0
"""Start groups a second; a step takes two, and its trainer far less than a second."""


@pytest.mark.system
def test_rollouts_that_come_too_slowly_are_the_bottleneck_and_a_shallow_buffer_is_used_up(
    workplace: Entente, trained: tuple[dict[str, Any], RunPaths, subprocess.CompletedProcess[str]]
):
    pipeline = ("--steps", "6", "--pipeline.buffer-depth", "1", "--pipeline.no-deterministic", "--pipeline.groups-per-task", "1")
    source = ("--simulated.from-run", "first", "--simulated.rate", str(RATE), "--training.learning-rate", "1e-12")
    done = workplace.process("train", "--config", "small.toml", "--run", "simulated", *pipeline, *source, "--json")
    assert done.returncode == 0, done.stderr
    assert "rollouts are SIMULATED: 2 start groups of run 'first', 2 a second at most" in done.stderr + done.stdout
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["simulated_from"] == "first" and "trained_score" not in summary
    run = read_run(RunPaths(workplace.folder / "runs" / "simulated"))
    told = explain_run(run.steps, run.settings)
    assert max(told.parts, key=told.parts.__getitem__) == "rollouts", told
    said = " ".join(told.sentences)
    assert "waiting for rollouts" in said and "The buffer was exhausted" in said
    assert "rollouts are simulated, 2 start groups a second at most" in said
    assert re.search(r"the one step that pipeline\.buffer_depth keeps ahead is used up", said)
