"""The main job, run as a user runs it: `entente train` in a process of its own, real Prefect and trainer; once real vLLM."""

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from entente.evaluation.intervals import format_count
from storage.ledger import ledger_path, read_ledger, recorded_steps
from storage.runs import RunPaths
from tests.shard_rows import read_rows, shard_files

PROMISED = {
    "base_score",
    "base_ci",
    "trained_score",
    "trained_ci",
    "random_score",
    "teacher_score",
    "steps",
    "wall_s",
    "decisions",
    "max_policy_lag_seen",
    "orders_rejected",
    "run",
}


def manifest(paths: RunPaths, version: int) -> dict[str, Any]:
    return json.loads((paths.adapter(version) / "manifest.json").read_text())


def used_rows(paths: RunPaths) -> dict[int, list[dict[str, Any]]]:
    """What each step trained on, by its ledger."""
    ledgers = {step: read_ledger(paths, step) for step in recorded_steps(paths)}
    return {step: ledger.to_pylist() for step, ledger in ledgers.items() if ledger is not None}


def test_the_last_line_is_the_promised_summary(trained):
    summary, paths, done = trained
    assert set(summary) >= PROMISED
    assert summary["steps"] == 2 and summary["orders_rejected"] == 0 and summary["max_policy_lag_seen"] == 0
    for name in ("base", "trained"):
        assert summary[f"{name}_ci"] is None, "two positions are of fewer than six games"
    assert summary["source_games"] <= summary["positions"] == 2
    assert f"no interval: {format_count(summary['source_games'], 'source games')}, and an interval takes 6" in done.stderr
    assert Path(summary["run"]).name == "first" and json.loads((paths.root / "summary.json").read_text()) == summary
    assert "step 2/2" in done.stderr and "Traceback" not in done.stderr


def test_the_run_folder_holds_everything_that_the_design_names(trained):
    _, paths, _ = trained
    settings = json.loads(paths.settings.read_text())
    assert settings["steps"] == 2 and settings["rollouts"]["horizon_years"] == 1, "preset and file, resolved"
    assert recorded_steps(paths) == [1, 2]
    assert sorted(path.name for path in paths.adapters.iterdir()) == ["v000001", "v000002"]
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["step_000001", "step_000002"]
    steps = [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()]
    assert steps == [0, 1, 2, 3], "one line for the probe, one a step, one for the scores"
    assert json.loads(paths.metrics.read_text().splitlines()[0])["mismatch/largest"] < 1e-4


def test_each_version_that_was_published_drew_the_next_step_s_rows(trained):
    _, paths, _ = trained
    sampled_by = {(row["start_group"] // 2, row["policy_version"], row["adapter_hash"]) for row in read_rows(*shard_files(paths))}
    assert sampled_by == {(0, 0, "base"), (1, 1, manifest(paths, 1)["adapter_hash"])}


def test_every_trained_row_was_played_and_stands_in_one_step_at_lag_zero(trained):
    _, paths, _ = trained
    used = used_rows(paths)
    assert max(Counter(row["decision_id"] for step in used.values() for row in step).values()) == 1
    sampled_by = {row["decision_id"]: row["policy_version"] for row in read_rows(*shard_files(paths))}
    assert [{sampled_by[row["decision_id"]] for row in used[step]} for step in (1, 2)] == [{0}, {1}]


@pytest.fixture(scope="module")
def ahead(workplace, trained) -> dict[str, psutil.Process]:
    """A run with vLLM whose rollouts are one step ahead, killed in its fourth step: its processes by their command lines."""
    flags = ["--pipeline.buffer-depth", "1", "--steps", "40", "--inference.engine", "vllm"]
    paths = RunPaths(workplace.folder / "runs" / "ahead")
    process = workplace.start("train", "--config", "small.toml", "--run", "ahead", *flags)
    try:
        while process.poll() is None and len(recorded_steps(paths)) < 3:
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        begun = {f"{each.pid} {' '.join(each.cmdline())}": each for each in family}
    finally:
        process.kill()
        _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    return begun


@pytest.mark.system
@pytest.mark.vllm
def test_server_core_and_trainer_end_when_the_run_is_killed(ahead):
    for part in ("vllm", "EngineCore", "training"):
        assert any(part in line for line in ahead), f"no process of {part} in {list(ahead)}"
    assert psutil.wait_procs(ahead.values(), timeout=30)[1] == [], "no process outlives the run"


@pytest.mark.slow
def test_a_run_whose_sampler_lies_refuses_to_start_and_trains_nothing(workplace, trained):
    """The engine draws at temperature 0.7 what its rows say was drawn at 1. That the trainer sees it, and is asked before each
    first step, quick tests say; here a whole run ends so."""
    program = """
from dataclasses import replace
from entente.inference.torch_batcher import PartialCompletion

honest = PartialCompletion.__init__
PartialCompletion.__init__ = lambda partial, request, answer: honest(partial, replace(request, temperature=0.7), answer)
from entente.cli.main import main
main()
"""
    done = workplace.process("train", "--config", "small.toml", "--run", "liar", program=program)
    assert done.returncode == 1
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("entente: ")]
    assert "trainer and engine disagree on version 0" in sentence and "Traceback" not in done.stderr
    paths = RunPaths(workplace.folder / "runs" / "liar")
    assert {row["temperature"] for row in read_rows(*shard_files(paths))} == {1.0}
    assert not ledger_path(paths, 1).exists() and not list(paths.adapters.iterdir())
