"""Who waited for whom: planted bottlenecks are named, and parts add up."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import BaseModel

from entente.reports import explain
from entente.reports.explain import explain_run, explain_step
from entente.reports.read_run import read_run
from entente.settings.run_settings import RunSettings
from entente.telemetry.setting_marks import setting_names
from entente.telemetry.stages import STAGES
from storage.runs import RunPaths
from tests.conftest import Entente

SETTINGS = {"pipeline": {"buffer_depth": 0}, "inference": {"max_sequences": 32}}
PLAIN = {
    "time/step_s": 10.0,
    "time/rollout_s": 1.0,
    "time/rollout_wait_s": 1.0,
    "train/select_s": 1.0,
    "train/plan_s": 1.0,
    "train/update_s": 2.0,
    "train/forward_s": 0.25,
    "train/backward_s": 0.5,
    "train/save_s": 1.0,
    "time/publish_s": 1.0,
    "train/tokens": 1000.0,
    "train/unique_tokens": 200.0,
    "train/unique_tokens_per_s": 100.0,
    "rollout/occupancy": 30.0,
    "rollout/ready_share": 1.0,
    "rollout/queue_ms_p50": 1.0,
    "rollout/decode_ms_p50": 50.0,
}
"""A step whose parts are one second each, but for the flow's own, which are four."""


def planted(seconds: float, *names: str) -> dict[str, float]:
    """The plain step with so many seconds more of these figures, and of the whole."""
    return PLAIN | {name: PLAIN[name] + seconds for name in (*names, "time/step_s")}


@pytest.mark.parametrize(
    ("figures", "part", "setting"),
    [
        (planted(20, "time/rollout_wait_s", "time/rollout_s"), "rollouts", "with a pipeline.buffer_depth of 0"),
        (planted(20, "train/plan_s", "train/update_s"), "plan", "training.token_budget"),
        (planted(20, "train/update_s", "train/backward_s"), "backward", "training.threads"),
        (planted(20), "orchestration", "rollouts.start_groups"),
    ],
)
def test_a_planted_bottleneck_is_named_with_the_setting_that_moves_it(figures: dict[str, float], part: str, setting: str):
    steps: dict[int, Mapping[str, float]] = {1: PLAIN, 2: PLAIN, 3: figures}
    found = explain_step(steps, 3, SETTINGS)
    assert sum(found.parts.values()) == pytest.approx(found.seconds) == 30
    assert sum(found.share(name) for name in STAGES) == pytest.approx(1)
    assert max(found.parts, key=found.parts.__getitem__) == part
    assert (
        f"took 3.0 times as long as the median of the others (30.0 s, 10.0 s); {STAGES[part]} took {found.parts[part]:.1f} s, "
        "20.0 s above its own median" in found.sentences[0]
    )
    most = "forward, backward, optimiser" if part == "backward" else STAGES[part]
    assert most in found.sentences[1] and setting in " ".join(found.sentences[2:])


@pytest.mark.parametrize(
    ("trouble", "urls", "said"),
    [
        ({"rollout/preemptions": 7.0}, [], "preempted 7 requests because its KV cache was full: raise inference.gpu_mem"),
        ({"rollout/occupancy": 3.0}, [], "ran 3 requests at once of at most 32: play more at a time"),
        ({"rollout/preemptions": 7.0}, ["http://one:1"], "was full: start the servers with a higher --gpu-memory-utilization"),
        ({"rollout/occupancy": 3.0}, ["http://one:1"], "of at most 32 (if the servers have the --max-sequences of this run)"),
    ],
)
def test_slow_rollouts_are_told_by_what_the_engine_reports(trouble: dict[str, float], urls: list[str], said: str):
    """The limits of servers elsewhere are not those of the run."""
    steps = {1: planted(20, "time/rollout_wait_s", "time/rollout_s") | trouble}
    sentences = explain_step(steps, 1, SETTINGS | {"inference": SETTINGS["inference"] | {"urls": urls}}).sentences
    assert sum(said in sentence for sentence in sentences) == 1


def test_why_step_3_takes_twice_as_long_is_told_as_an_empty_buffer():
    """Two steps lay ready when training began; the third is played while the trainer waits."""
    settings = {"pipeline": {"buffer_depth": 1}, "inference": {"max_sequences": 32}}
    ready = dict.fromkeys(("train/select_s", "train/plan_s", "train/save_s", "time/publish_s", "time/rollout_wait_s"), 0.0)
    quick = PLAIN | ready | {"time/step_s": 2.0, "time/rollout_s": 2.0, "train/update_s": 2.0}
    slow = {1: quick, 2: quick, 3: quick | {"time/step_s": 4.0, "time/rollout_wait_s": 2.0, "rollout/ready_share": 0.0}}
    sentences = explain_step(slow, 3, settings).sentences
    assert sentences[0].startswith("Step 3 took 2.0 times as long") and "waiting for rollouts" in sentences[0]
    assert any("The buffer was empty: only 0% of the requested groups were ready" in sentence for sentence in sentences)
    assert any("the one step that pipeline.buffer_depth keeps ahead is used up" in sentence for sentence in sentences)
    told = explain_run({1: quick, 2: quick}, settings)
    assert told.parts["rollouts"] == 0 and "The update computes" in " ".join(told.sentences)
    assert not any("The buffer was empty" in sentence for sentence in told.sentences)


def test_the_depth_of_the_buffer_is_that_of_the_explained_step_and_times_are_those_of_its_like():
    """A run that was resumed with another depth has steps of both."""
    settings, waits = (
        {"pipeline": {"buffer_depth": 2}, "inference": {"max_sequences": 32}},
        ("time/rollout_wait_s", "time/rollout_s"),
    )
    before = planted(20, *waits) | {"queue/depth": 0.0}
    since = planted(90, *waits) | {"queue/depth": 2.0, "rollout/ready_share": 0.0}
    steps = {1: before, 2: before, 3: since}
    assert any(
        "take turns with a pipeline.buffer_depth of 0: 21.0 s" in each for each in explain_step(steps, 1, settings).sentences
    )
    for explained in (explain_step(steps, 3, settings), explain_run(steps, settings)):
        assert any("only 0% of" in each and "take 91.0 s" in each and "the 2 steps" in each for each in explained.sentences)


def test_a_buffer_that_only_the_first_step_found_empty_is_not_called_used_up():
    settings = {"pipeline": {"buffer_depth": 1}, "inference": {"max_sequences": 32}}
    first = planted(90, "time/rollout_wait_s", "time/rollout_s") | {"rollout/ready_share": 0.0}
    sentences = explain_run({1: first, 2: PLAIN, 3: PLAIN}, settings).sentences
    assert any("Only 67% of the requested groups were ready" in sentence for sentence in sentences)
    assert not any("every later step waits" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("occupancy", "queue_ms", "deeper", "only_delays"),
    [
        pytest.param(3.0, 1.0, True, False, id="an engine with room"),
        pytest.param(30.0, 1.0, False, True, id="a busy engine"),
        pytest.param(3.0, 99.0, False, True, id="requests that queue"),
    ],
)
def test_the_advice_on_the_depth_of_the_buffer_does_not_contradict_itself(
    occupancy: float, queue_ms: float, deeper: bool, only_delays: bool
):
    settings = {"pipeline": {"buffer_depth": 1}, "inference": {"max_sequences": 32}}
    figures = {"rollout/occupancy": occupancy, "rollout/queue_ms_p50": queue_ms, "rollout/ready_share": 0.0}
    sentences = explain_run({1: planted(20, "time/rollout_wait_s", "time/rollout_s") | figures}, settings).sentences
    assert any("or pipeline.buffer_depth" in sentence for sentence in sentences) == deeper
    assert any("a deeper buffer only delays that" in sentence for sentence in sentences) == only_delays
    assert sentences[1].endswith("waiting for rollouts; without it, the run would make 400 steps an hour.")


def test_the_command_explains_a_run_and_its_steps(workplace: Entente, trained):
    paths: RunPaths = trained[1]
    run = read_run(paths)
    for step, figures in run.steps.items():
        found = explain_step(run.steps, step, run.settings)
        assert sum(found.parts.values()) == pytest.approx(figures["time/step_s"])
        assert found.parts["forward"] > 0 and found.parts["rollouts"] > 0
        assert found.parts["orchestration"] < 0.8 * found.seconds
        assert found.parts["orchestration"] == pytest.approx(figures["time/orchestration_s"])
    assert workplace("runs", "explain", "2", "--run", "first").stdout.startswith("step 2: ")
    said = workplace("runs", "explain", "--run", "first").stdout
    assert "an hour" in said and all(part in said for part in STAGES)
    for words, sentence in [
        (("runs", "explain", "99", "--run", "first"), "run 'first' has no figures of step 99: there are those of 1 to 2"),
        (("runs", "explain", "--run", "nowhere"), "there is no run in"),
    ]:
        refused = workplace(*words)
        assert refused.returncode == 2 and sentence in refused.stderr


def test_every_setting_that_an_explanation_names_exists():
    sections = "|".join(name for name, field in RunSettings.model_fields.items() if isinstance(field.default, BaseModel))
    named = set(re.findall(rf"(?<![.\w])(?:{sections})\.[a-z_]+\b(?!\()", Path(explain.__file__).read_text()))
    assert len(named) > 10 and named <= set(setting_names(RunSettings))
