"""Claims about `entente bench tune`, tried as a user: what it refuses at once, and a grid that is killed."""

import json
import signal
import time
from typing import Any

import pytest

from pipeline.run_settings import layered_settings

SMALL = ["--run", "first", "--max-sequences", "32", "--concurrency", "8", "--requests", "16", "--rounds", "1"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param([], "there is no run in 'runs' yet", id="no run"),
        pytest.param(["--empty-concurrency"], "concurrency", id="no load"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(entente: Any, words: list[str], sentence: str):
    done = entente("bench", "tune", *words)
    assert done.returncode == 2 and sentence in done.stderr
    assert [path.name for path in entente.folder.iterdir() if path.name != ".prefect"] == []


@pytest.mark.slow
@pytest.mark.vllm
def test_a_grid_outlives_a_kill_and_a_candidate_that_does_not_start(trained: Any, workplace: Any):
    # 256 tokens a pass are fewer than a sequence may have: vLLM itself refuses to start.
    words = ["bench", "tune", *SMALL, "--max-batched-tokens", "256", "4096", "--min-cache-hit", "0", "--json"]
    results = workplace.folder / "runs" / "_tuning" / "first" / "candidates"
    with workplace.start(*words) as process:
        deadline = time.monotonic() + 300
        while not list(results.glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert kept, "nothing was measured before the kill"
    done = workplace.process(*words, timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    (failure,) = outcome["failed"].values()
    assert "max_num_batched_tokens" in failure["why"] and "max_num_batched_tokens" in failure["log"]
    figures = outcome["chosen"]["figures"]
    assert figures["decisions_per_s"] > 0 and figures["latency_ms_p99"] > figures["first_token_ms"] > 0
    tuned = layered_settings("laptop", [workplace.folder / "small.toml", workplace.folder / outcome["toml"]])
    assert tuned.inference.max_in_flight == 8 and tuned.inference.max_sequences == 32

    again = workplace.process(*words, "--max-latency-ms", "0.001", timeout=600)
    assert again.returncode == 2 and "exceeds max_latency_ms 0" in again.stderr
    assert not (workplace.folder / outcome["toml"]).exists()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "measured twice"
