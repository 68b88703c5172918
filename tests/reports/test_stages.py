"""The stages of a step have one name each, wherever they are told."""

import re
from pathlib import Path

import pytest

from entente.reports import plots
from entente.reports.explain import explain_run
from entente.reports.page import Surroundings, html_of
from entente.telemetry.stages import STAGES, TRAINER_STAGES, stages_of, trainer_stages_of
from storage.runs import RunPaths
from tests.reports.conftest import facts

STEP = {
    "time/step_s": 10.0, "time/rollout_wait_s": 1.0, "time/publish_s": 0.5, "time/compare_s": 0.125, "time/score_s": 0.25,
    "train/select_s": 0.25, "train/update_s": 6.0,
    "train/plan_s": 0.5, "train/forward_s": 2.0, "train/backward_s": 3.0, "train/save_s": 0.75,
}  # fmt: skip


def test_they_add_up_to_the_step_also_where_a_figure_is_longer_than_it():
    assert stages_of(STEP) == pytest.approx(
        {
            "rollouts": 1,
            "compare": 0.125,
            "select": 0.25,
            "plan": 0.5,
            "forward": 2,
            "backward": 3,
            "optimiser": 0.5,
            "save": 0.75,
        }
        | {"publish": 0.5, "score": 0.25, "orchestration": 1.125}
    )
    assert list(stages_of(STEP)) == list(STAGES) and tuple(trainer_stages_of(STEP)) == TRAINER_STAGES
    assert stages_of(STEP | {"time/rollout_wait_s": 99.0}) == {**dict.fromkeys(STAGES, 0.0), "rollouts": 10.0}


def test_the_report_and_explain_run_tell_the_same_stages_by_the_same_names(tmp_path: Path):
    run = facts(steps={1: STEP})
    alt = re.search(r'aria-label="Wall time of the steps by stage: ([^"]*)."', plots.times(run) or "")
    assert alt is not None
    explained = explain_run({1: STEP}, {})
    assert alt[1] == ", ".join(f"{name} {explained.share(name):.0%}" for name in explained.parts)
    assert explained.parts == pytest.approx(stages_of(STEP))
    for stage, meaning in STAGES.items():
        assert f"{stage}: {meaning}" in html_of(run, Surroundings(paths=RunPaths(tmp_path)))
