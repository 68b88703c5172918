"""Recorded requests, and engines measured on them in a shape of random weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.recorded_requests import read, record
from telemetry.errors import InputError


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("recorded") / "requests.arrow"
    assert record(file, groups=1, forks=2, years=1, seed=3) == sum(map(len, read(file).by_notation.values()))
    return file


def test_a_recording_gives_the_requests_back_in_both_notations(recording: Path):
    found = read(recording)
    full, slot = (found.requests(notation, label="x") for notation in ("full", "slot"))
    assert sum(request.table.longest for request in slot) / len(slot) < sum(r.table.longest for r in full) / len(full)
    assert len({request.request_id for request in full}) == len(full) > 14
    assert len({tuple(request.prompt_ids) for request in full}) <= len(full) - 7, "forks begin with the same prompts"
    for request in full:
        assert max(max(request.prompt_ids), request.table.token_ids.max()) < found.vocabulary
        ends = request.table.next_nodes == -1
        assert (request.table.token_ids[ends] == found.eos_id).all(), "a completion ends with the model's end mark"


def test_what_is_no_recording_is_refused_in_a_sentence(tmp_path: Path):
    (tmp_path / "other").write_bytes(b"nothing of the kind")
    for name in ("other", "absent"):
        with pytest.raises(InputError, match=f"{name}' is no recording of requests"):
            read(tmp_path / name)


@pytest.mark.slow
def test_an_engine_is_measured_and_its_logprobs_are_held_against_transformers(recording: Path, tmp_path: Path):
    arguments = ["--scratch", str(tmp_path), "--shape", "tiny", "--dtype", "float32", "--most", "8", "--arms", "torch"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine_shapes", "measure", str(recording), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["metrics"]["torch"]
    assert 0 <= figures["torch_against_float32_mean_nats"] < figures["torch_against_float32_p99_nats"] < 1e-4
    for suffix in ("full", "full_one_version"):
        assert figures[f"decisions_per_s_8_in_flight_{suffix}"] > figures[f"decisions_per_s_1_in_flight_{suffix}"] > 0
