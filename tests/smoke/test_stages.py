"""What stages measure is what they say, and what is wrong fails them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.decode_cases import InstantEngine
from benchmarks.trainer_arms import Arms
from benchmarks.trainer_cases import Case, Shape
from smoke.engines import draw, illegal, make_requests, require_agreement
from smoke.job import Found, Job, Stage, StageFailed, StageResult
from smoke.models import model_folder, shape_of
from smoke.oracle import Checked, Reference
from smoke.rows import batch_of, first_rows, read_rows, write_rows
from smoke.stage import run_stage
from smoke.stages import attention
from smoke.stages.seeds import same_share
from smoke.training_step import Parts, fastest, measure_steps
from storage.runs import MODEL_FOLDER
from telemetry.errors import TrainingError
from tests.conftest import SMALL_MODEL
from training.mismatch import Mismatch
from training.settings import TinyModelSettings

SHAPE = Shape(family="qwen3", hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=96, vocabulary=512, tied=True)
SMALL = Case(positions=2, forks=3, own=40, completion=12)
STAGE = Stage(name="card", title="card", advice="the stage's own advice")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(device="cpu", model="", shape="tiny", folder=tmp_path)


@pytest.fixture(scope="module")
def drawn(model: Path) -> Any:
    """Real requests and legal completions, with made-up log-probabilities."""
    import asyncio

    requests = make_requests(model, 12, "r")
    return list(zip(requests, asyncio.run(draw(InstantEngine(), requests)), strict=True))


def test_without_a_given_model_the_products_tiny_one_is_made(job: Job, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("smoke.models.TINY", TinyModelSettings(**SMALL_MODEL))
    job.runs.mkdir()
    (job.runs / MODEL_FOLDER).symlink_to(model.parent)
    assert model_folder(job).samefile(model)


def test_requests_are_of_several_positions_and_both_phases(model: Path):
    requests = make_requests(model, 64, "r")
    assert len(requests) == 64 and len({request.snapshot_id for request in requests}) == 4
    assert len({tuple(request.prompt_ids) for request in requests}) > 28, "more than seven powers of four positions"


def test_rows_survive_their_file_and_rows_of_one_prompt_are_one_group(drawn, tmp_path: Path):
    write_rows(tmp_path / "rows.npz", drawn)
    batch = read_rows(tmp_path / "rows.npz")
    for row, (request, generation) in enumerate(drawn):
        ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist()
        assert ids == [*request.prompt_ids, *generation.token_ids.tolist()]
    groups = {tuple(request.prompt_ids): int(group) for (request, _), group in zip(drawn, batch.advantage_groups, strict=True)}
    assert len(set(groups.values())) == len(groups)
    few = first_rows(batch, 5)
    assert few.legal_offsets[-1] == len(few.legal_ids) and few.completion_offsets[-1] == len(few.behaviour_logprobs)
    assert (few.returns != 0).all() and len(few.decision_ids) == 5


def test_a_completion_that_its_table_does_not_allow_is_counted(drawn):
    request, generation = drawn[0]
    cut = replace(generation, token_ids=generation.token_ids[:-1])
    assert illegal(drawn) == 0 and illegal([*drawn, (request, cut)]) == 1


def test_the_reference_finds_a_wrong_probability_and_an_uncertain_forced_token(drawn, model: Path, job: Job):
    reference = Reference.load(model, "cpu", "float32")
    checked = reference.check(drawn)
    assert checked.gap.largest > 0.1 and checked.uncertain == checked.forced > 0, "made-up log-probabilities are all -1"
    with pytest.raises(StageFailed, match="forced tokens have a probability other than 1"):
        require_agreement(job, checked)
    with pytest.raises(TrainingError, match="trainer and engine disagree"):
        require_agreement(job, replace(checked, uncertain=0))
    require_agreement(job, Checked(gap=Mismatch(tokens=1, mean=0, p99=0, largest=5e-5), forced=1, uncertain=0, dtype="float32"))


def test_the_sizes_of_a_model_are_read_from_its_files(model: Path):
    shape = shape_of(model)
    assert (shape.hidden, shape.layers, shape.head_dim, shape.tied) == (64, 2, 32, True)


def test_the_share_of_equal_completions_is_by_place(drawn):
    one = [generation for _, generation in drawn]
    assert same_share(one, one) == 1.0 and same_share(one, one[::-1]) < 1.0


def test_a_part_that_fails_is_named_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch):
    ours = Arms.ours

    def out_of_memory(self, **how):
        if how.get("attention") == "dense":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ours(self, **how)

    monkeypatch.setattr(Arms, "ours", out_of_memory)
    parts = measure_steps(Arms(SHAPE), {"g8": SMALL}, ("ranges", "dense"), (64,), 1e12, 1)
    assert parts.failures == {"g8.dense": "OutOfMemoryError: CUDA out of memory"}
    assert {"g8.ranges.step_s", "g8.old.step_s", "g8.recompute.step_s", "budget.64.micro_batches"} <= set(parts.figures)
    assert fastest(parts.figures, "g8", ("dense", "ranges")) == "ranges"


def test_packed_attention_is_held_against_padded_rows(drawn):
    arms, parts = Arms(SHAPE), Parts()
    batch = first_rows(batch_of(drawn), 4)
    batch = replace(batch, input_ids=batch.input_ids % SHAPE.vocabulary, legal_ids=batch.legal_ids % SHAPE.vocabulary)
    attention.compare(parts, arms, batch, "drawn")
    assert parts.failures == {}
    assert max(parts.figures[f"drawn.{kind}.gradient_error"] for kind in ("ranges", "dense")) < 1e-5


class Module:
    """Stands for the module of a stage."""

    def __init__(self, outcome: Found | Exception) -> None:
        self._outcome = outcome

    def run(self, job: Job) -> Found:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        pytest.param(
            Found(sentence="good", figures={"a": 1.0}, notes=["n"]),
            StageResult(stage="card", state="passed", sentence="good", figures={"a": 1.0}, notes=("n",)),
            id="passed",
        ),
        pytest.param(
            StageFailed("bad", "this", {"a": 2.0}),
            StageResult(stage="card", state="failed", sentence="bad", attempt="this", figures={"a": 2.0}),
            id="failed with advice",
        ),
        pytest.param(
            ZeroDivisionError("no\nnumber"),
            StageResult(stage="card", state="failed", sentence="ZeroDivisionError: no number", attempt="the stage's own advice"),
            id="failed without",
        ),
    ],
)
def test_whatever_a_stage_does_is_a_result(job: Job, monkeypatch: pytest.MonkeyPatch, capsys, outcome, expected: StageResult):
    monkeypatch.setattr("importlib.import_module", lambda name: Module(outcome))
    assert run_stage(STAGE, job) == expected
    assert isinstance(outcome, Found) or "Traceback" in capsys.readouterr().err


def test_log_probabilities_are_summed_over_legal_ids_only(drawn, model: Path):
    from smoke.oracle import reference_logprobs

    reference = Reference.load(model, "cpu", "float32").model
    request, generation = drawn[0]
    found = reference_logprobs(reference, request, generation)
    _, offsets = request.table.legal_sets(generation.token_ids.tolist())
    assert (found[np.diff(offsets) == 1] == 0).all() and (found[np.diff(offsets) > 1] < 0).all()
