"""Claims about `entente bench tune`, tried as a user: what it refuses at once, one real candidate, and a grid that is killed."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cli.main import run
from pipeline.run_settings import layered_settings, settings_of

SMALL = ["--max-sequences", "32", "--max-batched-tokens", "4096", "--concurrency", "8", "--requests", "16", "--rounds", "1"]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of words that cannot be used."""
    assert run(["bench", "tune", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["--run", "nobody"], "there is no run in 'runs/nobody'", id="unknown run"),
        pytest.param(["lora", "--run", "nobody"], "there is no run in 'runs/nobody'", id="unknown run, lora"),
        pytest.param(
            ["--random-prompt-tokens", "200"],
            "200 prompt and 384 completion tokens exceed inference.max_model_length",
            id="shape",
        ),
        pytest.param(
            ["--gpu-memory-share", "0.9"], "gpu_memory_share says nothing where the engine computes on the CPU", id="axis"
        ),
        pytest.param(["--kv-cache-gib", "9999", "--config", "big.toml"], "none of the", id="memory"),
        pytest.param(["--empty-concurrency"], "concurrency and request_rate are both empty", id="no load"),
        pytest.param(["--max-sequences", "0"], "max_sequences", id="no sequences"),
        pytest.param(["--preset", "huge"], "there is no preset 'huge'", id="preset"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence_before_anything_is_written(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("inference.engine_cards.vllm_build", lambda: "cpu")
    (tmp_path / "big.toml").write_text("[inference]\nkv_cache_gib = 9998\n")
    said = " ".join(refused(words, capsys).split())
    assert sentence in said and said.count("entente:") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != ".prefect"] == ["big.toml"]


def test_a_dry_run_lists_candidates_and_time_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    grid = ["--max-sequences", "128", "256", "512", "--max-batched-tokens", "4096", "8192", "16384", "--block-size", "32", "64"]
    assert run(["bench", "tune", *grid, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["candidates"]) == 18 and plan["time"]["left_s"] > 0 and "a guess" in plan["time"]["basis"]
    assert next(iter(plan["candidates"])).endswith("(current)") and set(plan["candidates"].values()) == {"to be measured"}
    assert [path.name for path in tmp_path.iterdir() if path.name != ".prefect"] == []


@pytest.mark.vllm
@pytest.mark.slow
def test_a_candidate_is_measured_for_real_once_and_its_settings_can_be_trained_with(trained: Any, workplace: Any):
    words = ["bench", "tune", "--run", "first", *SMALL, "--min-cache-hit", "0", "--price-per-hour", "3.6", "--json"]
    done = workplace.process(*words)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    (only,) = outcome["candidates"]
    assert only["state"] == "measured" and only["current"] and outcome["after"]["key"] == only["key"]
    for arm in ("off", "on"):
        assert only[arm]["requests"] == 16 and only[arm]["decisions_per_s"] > 0 and only[arm]["cost_per_thousand"] > 0
        assert only[arm]["e2el_ms_p99"] >= only[arm]["e2el_ms_mean"] > only[arm]["ttft_ms_mean"] > 0
        assert only[arm]["itl_ms_p99"] >= only[arm]["itl_ms_mean"] > 0 and only[arm]["tpot_ms_mean"] > 0
    folder = workplace.folder / outcome["folder"]
    tuned = layered_settings("laptop", [workplace.folder / "small.toml", folder / "tuned.toml"])
    assert tuned.inference.max_in_flight == 8 and tuned.inference.max_sequences == 32
    assert "<svg" in (folder / "throughput.svg").read_text()
    before = {path: path.stat().st_mtime_ns for path in (folder / "candidates").iterdir()}

    again = workplace.process(*words, "--max-latency-ms", "0.001")
    assert again.returncode == 2 and "no candidate holds the constraints; the nearest misses them" in again.stderr
    assert "exceeds max_latency_ms 0 by" in again.stderr and not (folder / "tuned.toml").exists()
    assert {path: path.stat().st_mtime_ns for path in (folder / "candidates").iterdir()} == before, "measured twice"


@pytest.mark.slow
@pytest.mark.vllm
def test_a_grid_outlives_a_kill_a_candidate_that_does_not_start_and_other_settings(trained: Any, workplace: Any):
    grid = ["--block-size", "32", "64", "--min-cache-hit", "0", "--output", "grid"]
    words = ["bench", "tune", "--run", "first", *SMALL, *grid, "--json"]
    # 256 tokens a pass are fewer than a sequence may have: vLLM itself refuses to start.
    words[words.index("4096")] = "256"
    results = workplace.folder / "grid" / "candidates"
    with workplace.start(*words) as process:
        deadline = time.monotonic() + 300
        while not list(results.glob("*.arrow")) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in results.glob("*.arrow")}
    assert kept, "nothing was measured before the kill"
    done = workplace.process(*words, timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    states = [(each["settings"]["max_batched_tokens"], each["state"]) for each in outcome["candidates"]]
    assert sorted(states) == [(256, "not started"), (256, "not started"), (4096, "measured")]
    failed = next(each for each in outcome["candidates"] if each["state"] == "not started")
    assert "max_num_batched_tokens" in failed["log"] and "max_num_batched_tokens" in failed["reason"]
    assert outcome["after"]["current"]
    other = workplace.process(*words, "--seed", "1")
    assert other.returncode == 2 and "has results for seed 0, not 1: give another --output" in other.stderr


@pytest.mark.slow
@pytest.mark.vllm
def test_lora_slots_are_measured_beside_merged_weights(trained: Any, workplace: Any):
    done = workplace.process("bench", "tune", "lora", "--run", "first", "--requests", "8", "--rounds", "1", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    times = {row["served as"]: float(row["times"]) for row in outcome["rows"]}
    assert times["merged weights"] == 1 and times["slots"] > 1.05 and "'merge_reload'" in outcome["advice"]
    assert settings_of(trained[1]).inference.adapters == "merge_reload"
