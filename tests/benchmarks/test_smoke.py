"""A smoke test finds its device, and ends in settings and a JSON object."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.smoke import engine_stages, trainer_stages
from benchmarks.smoke.job import STAGES, Job, StageFailed, StagePass, chosen_stages, figures_so_far
from benchmarks.smoke.smoke_test import plan_job, run_stage, smoke_test
from entente.settings.find_model import check_length, tiny_shape
from entente.settings.layers import layered_settings
from entente.telemetry.cards import VARIABLE
from entente.telemetry.child import ChildResult
from entente.telemetry.errors import InputError
from tests.telemetry.fake_nvml import FakeCard, FakeNvml

ONE_CARD = FakeNvml(cards=(FakeCard(uuid="GPU-1", name="NVIDIA H200 141GB"),))
NO_CARD = FakeNvml(cards=())
PASSED = {"passed": True, "sentence": "it works", "figures": {"rate": 1.5}}


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


class Children:
    """Stands in for `run_child`: a stage returns what is named for it, else it passes."""

    def __init__(self, **results: ChildResult) -> None:
        self.results, self.begun = results, list[str]()

    async def __call__(self, module: str, job: dict[str, Any], log: Path, **how: Any) -> ChildResult:
        self.begun.append(job["stage"])
        self.environment = how["environment"]
        return self.results.get(job["stage"], ChildResult(answer=PASSED, seconds=2.0))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return plan_job("cpu", "tiny", tmp_path)[0]


def test_the_first_visible_card_is_tested_in_a_folder_named_after_it(tmp_path: Path):
    job, card = plan_job("auto", "tiny", tmp_path, ONE_CARD)
    assert card is not None and card.uuid == "GPU-1"
    assert (job.device, job.model, job.dtype) == ("cuda", "tiny", "bfloat16")
    assert job.folder == tmp_path / "_smoke" / "nvidia-h200-141gb-tiny"


@pytest.mark.parametrize(("device", "nvml"), [("cpu", ONE_CARD), ("auto", NO_CARD)])
def test_a_cpu_is_tested_where_there_is_no_card_or_where_it_is_asked_for(tmp_path: Path, device: Any, nvml: Any):
    job, card = plan_job(device, "tiny", tmp_path, nvml)
    assert card is None
    assert (job.device, job.model, job.dtype, job.folder.name) == ("cpu", "tiny", "float32", "cpu-tiny")


def test_a_card_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="--device is 'cuda' but no card is visible here"):
        plan_job("cuda", "tiny", tmp_path, NO_CARD)
    monkeypatch.setenv(VARIABLE, "5")
    with pytest.raises(InputError, match="names '5', which is no card of this machine"):
        plan_job("auto", "tiny", tmp_path, ONE_CARD)


def test_a_failed_stage_is_told_and_settings_follow_from_those_that_passed_in_any_start(job: Job):
    first = Children(**{"legal-mask": ChildResult(answer=None, why="its process ended by SIGKILL", log="no room", seconds=3.0)})
    outcome = smoke_test(job, None, run=first)
    assert first.begun == [stage.name for stage in STAGES] and not outcome["passed"]
    assert first.environment == {"CUDA_VISIBLE_DEVICES": ""}
    failed = next(each for each in outcome["stages"] if each["stage"] == "legal-mask")
    assert {"sentence": "its process ended by SIGKILL", "advice": "inference.engine = 'torch'", "log": "no room"}.items() <= (
        failed.items()
    )
    assert json.loads(Path(outcome["results"]).read_text()) == outcome
    assert outcome["command"] == f"entente train --preset laptop --config {job.folder / 'preset.toml'}"
    second = Children()
    assert smoke_test(job, None, only=["legal-mask"], run=second)["passed"] and second.begun == ["card", "legal-mask"]
    assert set(figures_so_far(job)) == {stage.name for stage in STAGES}


def test_on_a_card_the_steps_and_the_recommended_run_train_the_model_of_the_job_at_a_length_that_it_has(tmp_path: Path):
    job = plan_job("auto", "tiny", tmp_path, ONE_CARD)[0]
    card = ChildResult(answer=PASSED | {"figures": {"total_bytes": 80.0 * 2**30}}, seconds=2.0)
    command = smoke_test(job, None, run=Children(card=card))["command"].split()
    assert command[3] == "gpu-80"
    for words in (command[2:], trainer_stages._arguments(job)):
        settings = layered_settings(words[1], [Path(word) for word in words if word.endswith(".toml")])
        assert settings.inference.model == "tiny"
        check_length(settings.inference, tiny_shape(settings.tiny_model, settings.prompts).positions, "tiny")


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        pytest.param(StagePass(sentence="good", figures={"a": 1.0}), {"passed": True, "figures": {"a": 1.0}}, id="passed"),
        pytest.param(StageFailed("bad", "this"), {"passed": False, "advice": "this"}, id="failed"),
        pytest.param(
            ZeroDivisionError("no\nnumber"), {"passed": False, "sentence": "ZeroDivisionError: no number"}, id="crashed"
        ),
    ],
)
def test_whatever_a_stage_does_is_a_result(job: Job, monkeypatch: pytest.MonkeyPatch, outcome: Any, expected: dict[str, Any]):
    def stage(handed: Job) -> StagePass:
        assert handed == job
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(engine_stages, "legal_mask", stage)
    assert expected.items() <= run_stage(job.as_object() | {"stage": "legal-mask"}).items()


def test_every_stage_has_its_function():
    modules = {"engine": engine_stages, "trainer": trainer_stages}
    assert len(STAGES) >= 5
    assert [stage.name for stage in STAGES if not callable(getattr(modules[stage.module], stage.name.replace("-", "_")))] == []
    assert [stage.name for stage in chosen_stages(["legal-mask"])] == ["card", "legal-mask"]


def test_bad_words_end_with_exit_code_2(entente: Any):
    done = entente("smoke", "--only", "jmp")
    assert done.returncode == 2 and "there is no stage 'jmp': --only takes card, engine" in done.stderr
    assert list(entente.folder.iterdir()) == []


@pytest.mark.slow
def test_all_stages_pass_on_a_cpu(entente: Any):
    done = entente.process("smoke", "--device", "cpu", "--json", timeout=900)
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert {each["stage"]: each["sentence"] for each in outcome["stages"] if not each["passed"]} == {}
    assert done.returncode == 0 and outcome["passed"]
    figures = {each["stage"]: each["figures"] for each in outcome["stages"]}
    assert 0 <= figures["legal-mask"]["gap_largest_nats"] < 1e-4 and figures["steps"]["step_s"] > 0
    accepted = entente("train", "--config", str(Path(outcome["results"]).with_name("preset.toml")), "--dry-run")
    assert accepted.returncode == 0, accepted.stderr
