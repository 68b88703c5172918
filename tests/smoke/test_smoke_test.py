"""A smoke test finds its device, refuses what cannot be tested, and ends in a page, settings and a JSON object."""

import json
from pathlib import Path

import pytest

from smoke.job import STAGES, chosen_stages
from smoke.run_stages import figures_in_force
from smoke.smoke_test import plan_job, smoke_test
from telemetry.cards import VARIABLE
from telemetry.errors import InputError
from telemetry.machine import environment
from tests.smoke.test_run_stages import Program
from tests.telemetry.fake_nvml import FakeCard, FakeNvml

ONE_CARD = FakeNvml(cards=(FakeCard(uuid="GPU-1", name="NVIDIA H200 141GB"),))
NO_CARD = FakeNvml(cards=())


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_the_first_visible_card_is_tested_in_a_folder_named_after_it(tmp_path: Path):
    job, card = plan_job("auto", "", "", tmp_path, ONE_CARD)
    assert card is not None and card.uuid == "GPU-1"
    assert (job.device, job.shape, job.dtype) == ("cuda", "qwen2.5-7b", "bfloat16")
    assert job.folder == tmp_path / "_smoke" / "nvidia-h200-141gb"


@pytest.mark.parametrize(("device", "nvml"), [("cpu", ONE_CARD), ("auto", NO_CARD)])
def test_a_cpu_is_tested_where_there_is_no_card_or_where_it_is_asked_for(tmp_path: Path, device, nvml):
    job, card = plan_job(device, "", "", tmp_path, nvml)
    assert card is None
    assert (job.device, job.shape, job.dtype, job.folder.name) == ("cpu", "tiny", "float32", "cpu")


@pytest.mark.parametrize(
    ("device", "model", "shape", "sentence"),
    [
        pytest.param("cuda", "", "", "--device is 'cuda' but no card is visible here", id="no card"),
        pytest.param("auto", "some", "tiny", "--model and --shape exclude each other", id="two models"),
        pytest.param("auto", "", "huge", "there is no shape 'huge': --shape takes tiny, qwen2.5-1.5b", id="no such shape"),
    ],
)
def test_what_cannot_be_tested_is_refused_in_a_sentence(tmp_path: Path, device, model: str, shape: str, sentence: str):
    with pytest.raises(InputError, match=sentence):
        plan_job(device, model, shape, tmp_path, NO_CARD)
    assert list(tmp_path.iterdir()) == []


def test_a_variable_that_names_no_card_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, "5")
    with pytest.raises(InputError, match="names '5', which is no card of this machine"):
        plan_job("auto", "", "", tmp_path, ONE_CARD)


def test_a_test_writes_its_page_its_settings_and_its_result(tmp_path: Path):
    job, card = plan_job("cpu", "", "", tmp_path)
    found = smoke_test(job, card, command=Program(jump="write('failed')"))
    assert not found.passed and [result.stage for result in found.results] == [stage.name for stage in STAGES]
    assert json.loads((job.folder / "smoke.json").read_text()) == json.loads(json.dumps(found.as_object()))
    assert "the first to fail is" in found.page.read_text()
    assert job.preset.read_text() == found.preset
    settings = figures_in_force(job, environment())
    assert "jump" not in settings and settings["engine"] == {"rate": 1.5}
    smoke_test(job, card, only=["seeds"], command=Program())
    assert figures_in_force(job, environment()).keys() == settings.keys(), "what an earlier start measured counts"
    assert figures_in_force(job, {"torch": "another"}) == {}
    assert found.command == f"entente train --preset laptop --config {job.preset}"


def test_a_dry_run_names_the_stages_and_starts_nothing(entente):
    done = entente("smoke", "--device", "cpu", "--dry-run", "--json", "--only", "seeds")
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["stages"]) == ["card", "model", "seeds"]
    assert list(entente.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["--only", "jmp"], "there is no stage 'jmp'", id="stage"),
        pytest.param(["--device", "cpu", "--shape", "huge"], "there is no shape 'huge'", id="shape"),
    ],
)
def test_bad_words_end_with_exit_code_2_before_anything_starts(entente, words: list[str], sentence: str):
    done = entente("smoke", *words)
    assert done.returncode == 2 and sentence in done.stderr
    assert list(entente.folder.iterdir()) == []


@pytest.mark.vllm
@pytest.mark.parametrize(
    "only",
    [
        # The other stages are held by tests of what they call: the mask, jump, seeds, adapters, attention, steps, whole runs.
        pytest.param(("engine", "shared-card"), marks=pytest.mark.system, id="some"),
        pytest.param((), marks=pytest.mark.slow, id="all"),
    ],
)
def test_stages_pass_on_a_cpu_and_a_second_start_repeats_nothing(entente, model: Path, only: tuple[str, ...]):
    words = ["smoke", "--device", "cpu", "--json"]
    if only:
        words += ["--model", str(model), *(word for stage in only for word in ("--only", stage))]
    done = entente.process(*words, timeout=900)
    told = json.loads(done.stdout.splitlines()[-1])
    assert {each["stage"]: each["sentence"] for each in told["stages"] if not each["passed"]} == {}
    assert done.returncode == 0 and told["passed"]
    figures = {each["stage"]: each["figures"] for each in told["stages"]}
    assert list(figures) == [stage.name for stage in chosen_stages(only)]
    assert min(figures["engine"]["decisions_per_s.8"], figures["engine"]["decisions_per_s.1"]) > 0
    if not only:
        assert 0 <= figures["legal-mask"]["gap_mean_nats"] <= figures["legal-mask"]["gap_largest_nats"] < 1e-4
        assert figures["resume"]["same_share"] == 1.0
    accepted = entente("train", "--config", str(Path(told["page"]).with_name("preset.toml")), "--dry-run")
    assert accepted.returncode == 0, accepted.stderr
    again = entente(*words)
    assert json.loads(again.stdout.splitlines()[-1]) == told
