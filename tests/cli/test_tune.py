"""`entente bench tune`, tried as a user: a small grid."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.tune_engine import COLUMNS
from entente.cli.smoke import smoke
from entente.cli.tune import _show_rows, tune
from entente.settings.layers import layered_settings
from entente.telemetry.errors import InputError
from storage.files import file_lock
from storage.runs import RunPaths

SMALL = ["--run", "first", "--max-sequences", "32", "--max-batched-tokens", "4096", "--start-groups", "2", "--rounds", "1"]


@pytest.mark.parametrize("served", [False, True])
def test_the_tuned_settings_are_for_the_run_that_was_tuned(
    stored_run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: bool
):
    """A file of three settings beside no run would train the laptop preset."""

    async def measure(settings: Any, tuning: Any, candidates: Any, folder: Path) -> Any:
        figures = dict.fromkeys(("decisions_per_s", "tokens_per_s", "latency_ms_p99", "first_token_ms", "spread"), 0.0)
        return {candidates[0]: figures | {"cache_hit": 1.0}}, {}

    monkeypatch.setattr("entente.cli.tune.measure_candidates", measure)
    root = stored_run.root.parent
    (more := root / "more.toml").write_text("inference.kv_cache_gib = 2\n")  # the candidates were measured with it
    if served:
        more.write_text('inference.urls = ["http://elsewhere:1"]\n')
    tune(run="before", config=[more], runs_root=root)
    command = f"entente train --run before --runs-root {root} --resume --config {more} --config {root}/_tuning/before/tuned.toml"
    if served:  # they do not read the run's settings
        command = "`entente serve` with --max-sequences 32 --max-batched-tokens 4096 --gpu-memory-utilization 0.85"
    assert command in capsys.readouterr().out and command in (root / "_tuning/before/tuned.toml").read_text()


def test_two_at_once_in_one_folder_are_refused_because_each_would_measure_jobs_of_the_other(stored_run: RunPaths):
    root = stored_run.root.parent
    with file_lock(root / "_tuning" / "before" / ".lock"), pytest.raises(InputError, match="another command tunes run 'before'"):
        tune(run="before", runs_root=root)
    with file_lock(root / "_smoke" / "cpu-tiny" / ".lock"), pytest.raises(InputError, match="another command tests in"):
        smoke(device="cpu", runs_root=root)


@pytest.mark.slow
def test_a_grid_ends_with_settings_that_a_run_takes(trained: Any, workplace: Any):
    done = workplace.process("bench", "tune", *SMALL, "--min-cache-hit", "0", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["chosen"]["decisions_per_s"] > 0
    assert outcome["chosen"]["latency_ms_p99"] > outcome["chosen"]["first_token_ms"] > 0
    tuned = workplace.folder / "runs" / "_tuning" / "first" / "tuned.toml"
    assert layered_settings("laptop", [workplace.folder / "small.toml", tuned]).inference.max_batched_tokens == 4096
    again = workplace.process("bench", "tune", *SMALL, "--max-latency-ms", "0.001", timeout=600)
    assert again.returncode == 2 and "exceeds max_latency_ms 0" in again.stderr and not tuned.exists()


def test_a_narrow_terminal_cuts_no_figure_and_no_note(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("entente.cli.terminal.output_console", lambda columns: Console(width=80))
    _show_rows([{"candidate": "max_sequences 256, kv_cache_gib 12.5"} | dict.fromkeys(COLUMNS, "123,456.7") | {"note": "misses"}])
    printed = capsys.readouterr().out
    assert "…" not in printed and "misses" in printed
