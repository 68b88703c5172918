"""Claims about what a tuner keeps: results whole and found again, a folder for one question, requests of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.settings import InferenceSettings
from pipeline.tuning_folder import CANDIDATES, claim_folder, read_result, recorded_rows, write_result
from storage.arrow_files import read_arrow
from storage.runs import RunPaths
from storage.shards import open_shard
from telemetry.errors import InputError
from tuning.candidates import Candidate
from tuning.figures import FIGURES, ArmFigures
from tuning.job import Measured
from tuning.requests import AskedRow, read_requests

CANDIDATE = Candidate(settings=InferenceSettings(prefix_caching=False), concurrency=8)


def whole() -> Measured:
    told: dict[str, Any] = {name: number / 8 for number, name in enumerate(FIGURES)} | {"requests": 3}
    arms = {arm: ArmFigures(**told, e2el_ms=(1.5, 2.5, 4.0)) for arm in ("off", "on")}
    return Measured(state="measured", engine="vllm", adapters="slots", start_s=2.5, seconds=9.0, cpu_s=8.0, arms=arms)


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(whole(), id="measured"),
        pytest.param(Measured(state="not started", reason="no room", log="one\ntwo", arms={}), id="not started"),
    ],
)
def test_a_result_is_found_again_as_it_was_and_can_be_read_by_anything_that_reads_arrow(tmp_path: Path, result: Measured):
    assert read_result(tmp_path, CANDIDATE) is None
    write_result(tmp_path, CANDIDATE, result)
    assert read_result(tmp_path, CANDIDATE) == result
    table = read_arrow(tmp_path / CANDIDATES / f"{CANDIDATE.key}.arrow")
    assert table["arm"].to_pylist() == list(result.arms) and set(FIGURES) | {"max_sequences", "concurrency"} <= set(
        table.column_names
    )


def test_a_result_takes_the_place_of_one_that_failed(tmp_path: Path):
    write_result(tmp_path, CANDIDATE, Measured(state="died", reason="once", arms={}))
    write_result(tmp_path, CANDIDATE, whole())
    assert read_result(tmp_path, CANDIDATE) == whole()


def test_a_damaged_result_is_measured_again(tmp_path: Path):
    write_result(tmp_path, CANDIDATE, whole())
    file = tmp_path / CANDIDATES / f"{CANDIDATE.key}.arrow"
    file.write_bytes(file.read_bytes()[:-40])
    assert read_result(tmp_path, CANDIDATE) is None


ROW = AskedRow(prompt_ids=[5, 6], legal_ids=[4, 7, 2], legal_offsets=[0, 2, 3], seed=1)


def test_a_folder_keeps_its_requests_and_refuses_other_settings_by_name_and_value(tmp_path: Path):
    folder = tmp_path / "results"
    first = claim_folder(folder, {"dtype": "float32", "asked": (1, 2)}, lambda: [ROW])
    assert claim_folder(folder, {"dtype": "float32", "asked": (1, 2)}, lambda: []) == first
    assert read_arrow(first).num_rows == 1
    with pytest.raises(InputError, match=r'results for dtype "float32", not "bfloat16": give another --output'):
        claim_folder(folder, {"dtype": "bfloat16", "asked": (1, 2)}, lambda: [])


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not a folder of tuning results"):
        claim_folder(tmp_path, {}, lambda: [ROW])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_requests_of_a_run_are_its_prompts_and_masks_and_are_asked_ply_by_ply(trained: Any, tmp_path: Path):
    _, paths, _ = trained
    rows = recorded_rows(paths, 10_000, max_model_length=512)
    stored = [open_shard(path) for path in sorted(paths.shards.glob("*/*.arrow")) if path.stem.isdigit()]
    by_seed = {row["seed"]: row for table in stored for row in table.to_pylist()}
    assert len(rows) == sum(table.num_rows for table in stored)
    for row in rows:
        other = by_seed[row.seed]
        assert list(row.prompt_ids) == other["input_ids"][: other["prompt_len"]] and list(row.legal_ids) == other["legal_ids"]
    newest = max(stored, key=lambda table: max(table["start_group"].to_pylist()))
    plies = [by_seed[row.seed]["ply"] for row in rows[: newest.num_rows]]
    assert plies == sorted(plies), "the newest shard comes first, each of its plies before the next"


def test_requests_of_a_run_can_be_drawn_with_its_model_and_have_its_lengths(trained: Any, tmp_path: Path):
    from pipeline.plans.find_model import model_of
    from pipeline.run_settings import settings_of

    _, paths, _ = trained
    model = model_of(settings_of(paths), paths.root.parent, paths.root.name)
    rows = recorded_rows(paths, 6, max_model_length=512)
    requests = read_requests(claim_folder(tmp_path / "results", {}, lambda: rows), model)
    assert [request.table.longest for request in requests] == [len(row.legal_offsets) - 1 for row in rows]
    assert all(np.array_equal(request.prompt_ids, row.prompt_ids) for request, row in zip(requests, rows, strict=True))


def test_requests_longer_than_the_engine_takes_and_runs_without_any_are_refused(trained: Any, tmp_path: Path):
    _, paths, _ = trained
    with pytest.raises(InputError, match=r"tokens, but inference.max_model_length is 64: raise it"):
        recorded_rows(paths, 6, max_model_length=64)
    with pytest.raises(InputError, match="has no decisions to tune on"):
        recorded_rows(RunPaths(tmp_path), 6, max_model_length=512)
