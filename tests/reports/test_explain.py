"""Who waited for whom: planted bottlenecks are named, and parts add up."""

import re
from collections.abc import Mapping

import pytest

from entente.reports.explain import explain_run, explain_step
from entente.reports.read_run import read_run
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
        (planted(20, "time/rollout_wait_s", "time/rollout_s"), "rollouts", "pipeline.buffer_depth is 0"),
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
        f"took 3.0 times as long as the median of the others (30.0 s, 10.0 s); 20.0 s of it is {STAGES[part]}"
        in found.sentences[0]
    )
    most = "forward, backward, optimiser" if part == "backward" else STAGES[part]
    assert most in found.sentences[1] and setting in " ".join(found.sentences[2:])


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (
            {"rollout/preemptions": 7.0},
            "put 7 requests back because its key-value cache was full: raise inference.gpu_mem",
        ),
        ({"rollout/occupancy": 3.0}, "drew 3 requests together of the 32 it could: play more at a time"),
    ],
)
def test_slow_rollouts_are_told_by_what_the_engine_reports(trouble: dict[str, float], said: str):
    steps = {1: planted(20, "time/rollout_wait_s", "time/rollout_s") | trouble}
    sentences = explain_step(steps, 1, SETTINGS).sentences
    assert len([sentence for sentence in sentences if re.search(said, sentence)]) == 1


def pipeline(steps: int, *, depth: int, rollout_s: float, train_s: float, head_start_s: float) -> dict[int, dict[str, float]]:
    """Figures of a simulated run: one engine that plays step after step, a trainer that takes them in order.

    Rollouts of a step are submitted `depth` steps before it, and the first ones while the base is scored.
    """
    played: dict[int, float] = {}
    now = free = 0.0
    figures = {}
    for step in range(1, steps + 1):
        for wanted in range(step, step + depth + 1):
            if wanted not in played:
                free = played[wanted] = max(free, now) + rollout_s
        if step == 1:
            now = head_start_s
        asked, began = now, now if step > 1 else head_start_s
        now = max(now, played[step]) + train_s
        figures[step] = PLAIN | {
            "time/step_s": now - began,
            "time/rollout_wait_s": max(0.0, played[step] - asked),
            "time/rollout_s": min(rollout_s, now - began),
            "rollout/ready_share": float(played[step] <= asked),
            "train/select_s": 0.0,
            "train/plan_s": 0.0,
            "train/update_s": train_s,
            "train/save_s": 0.0,
            "time/publish_s": 0.0,
        }
    return figures


def test_why_step_3_takes_twice_as_long_is_told_as_an_exhausted_buffer():
    """Two steps lie ready when training begins; the third has to be played while the trainer waits."""
    settings = {"pipeline": {"buffer_depth": 1}, "inference": {"max_sequences": 32}}
    slow = pipeline(6, depth=1, rollout_s=4.0, train_s=2.0, head_start_s=8.0)
    assert slow[3]["time/step_s"] >= 1.9 * slow[2]["time/step_s"]
    sentences = explain_step({step: slow[step] for step in (1, 2, 3)}, 3, settings).sentences
    assert sentences[0].startswith("Step 3 took 2.0 times as long") and "waiting for rollouts" in sentences[0]
    assert any("The buffer was exhausted: 0% of what the trainer asked for was there" in sentence for sentence in sentences)
    assert any("the one step that pipeline.buffer_depth keeps ahead is used up" in sentence for sentence in sentences)
    whole = " ".join(explain_run({step: slow[step] for step in (1, 2, 3)}, settings).sentences)
    assert "Step 3 took" in whole and "waiting for rollouts" in whole and "runs explain" not in whole
    fast = pipeline(6, depth=1, rollout_s=1.0, train_s=2.0, head_start_s=8.0)
    told = explain_run(fast, settings)
    assert told.parts["rollouts"] == 0 and "The trainer is the limit" in " ".join(told.sentences)
    assert not any("exhausted" in sentence for sentence in told.sentences)


def test_the_command_explains_a_run_and_its_steps(workplace: Entente, trained):
    paths: RunPaths = trained[1]
    run = read_run(paths)
    for step, figures in run.steps.items():
        found = explain_step(run.steps, step, run.settings)
        assert sum(found.parts.values()) == pytest.approx(figures["time/step_s"])
        assert found.parts["forward"] > 0 and found.parts["rollouts"] > 0
        assert found.parts["orchestration"] < 0.8 * found.seconds
    assert workplace("runs", "explain", "2", "--run", "first").stdout.startswith("step 2: ")
    said = workplace("runs", "explain", "--run", "first").stdout
    assert "an hour" in said and all(part in said for part in STAGES)
    for words, sentence in [
        (("runs", "explain", "99", "--run", "first"), "run 'first' has no figures of step 99: there are those of 1 to 2"),
        (("runs", "explain", "--run", "nowhere"), "there is no run in"),
    ]:
        refused = workplace(*words)
        assert refused.returncode == 2 and sentence in refused.stderr
