"""Claims about what the report says in words."""

import pytest

from evaluation.score_files import ScoreRecord
from evaluation.settings import EvaluationSettings
from evaluation.strength import Score
from reports import plots
from reports.page import named_scores
from reports.sentences import hidden_rollouts, mismatch, verdict
from tests.reports.conftest import SETTINGS, facts


def record(mean: float, low: float, high: float, version: int = 0, player: str = "policy", games: int = 7) -> ScoreRecord:
    score = Score(mean=mean, low=low, high=high, forks=8, positions=8, source_games=games, orders_rejected=0)
    settings = EvaluationSettings(positions=4, horizon_years=2)
    return ScoreRecord(label="", player=player, opponents="mover", policy_version=version, settings=settings, score=score)


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        pytest.param((1.0, 0.81, 1.2), "do not overlap: training helped", id="above"),
        pytest.param((1.0, 0.79, 1.2), "overlap: these positions alone do not tell", id="overlapping"),
        pytest.param((0.1, 0.0, 0.2), "do not overlap: training did harm", id="below"),
    ],
)
def test_the_verdict_claims_no_more_than_the_intervals_bear(trained: tuple[float, float, float], said: str):
    words = verdict({"base": record(0.6, 0.4, 0.8), "trained": record(*trained, version=4)})
    assert (
        said in words
        and "+0.60 [+0.40, +0.80]" in words
        and "in 2 game years" in words
        and "8 held-out positions of 7 source games" in words
    )


def test_a_verdict_over_few_source_games_has_no_interval_and_says_what_one_takes():
    words = verdict({"base": record(0.6, 0.4, 0.8, games=2), "trained": record(1.0, 0.9, 1.2, version=4, games=2)})
    assert "gains +1.00 supply centres" in words and "8 held-out positions of 2 source games" in words and "[" not in words
    assert words.endswith("There is no interval: 2 source games, and an interval takes 6.") and "helped" not in words


@pytest.mark.parametrize(
    ("label", "said", "row"),
    [
        pytest.param(
            "teacher", "a random player gains +0.20 and the imitated teacher +0.40", "imitated teacher (mover)", id="tiny"
        ),
        pytest.param("mover", "a random player gains +0.20 and the scripted player mover +0.40", "mover", id="own model"),
    ],
)
def test_only_a_player_that_the_model_imitated_is_called_its_teacher(label: str, said: str, row: str):
    scores = {
        label: record(0.4, 0.3, 0.5, player="mover"),
        "random": record(0.2, 0.1, 0.3, player="random"),
        "base": record(0.6, 0.4, 0.8),
    }
    assert said in verdict(scores)
    assert [name for name, _ in named_scores(scores)] == ["random", row, "base"]


def test_the_agreement_of_trainer_and_engine_is_told_with_the_limit_that_was_in_force():
    found = {"mismatch/tokens": 479.0, "mismatch/mean": 0.01, "mismatch/p99": 0.1, "mismatch/largest": 3.34e-6}
    assert "at most 3.3 × 10⁻⁶ nats over 479 tokens; the limit is 1 × 10⁻⁴" in mismatch(facts(mismatch=found))
    half = SETTINGS | {"inference": {"dtype": "bfloat16"}}
    assert "0.01 nats in the mean (limit 0.03) and 0.1 at the 99th percentile (limit 0.15)" in mismatch(
        facts(mismatch=found, settings=half)
    )
    assert "have not been compared" in mismatch(facts())


def test_parts_of_a_step_add_up_to_its_wall_time_and_rollouts_behind_training_are_told_apart():
    # 10 s: 6 of training, behind which 5 of rollouts ran; 3 more of rollouts that the trainer waited for; 1 of the flow.
    step = {"time/step_s": 10.0, "time/train_s": 6.0, "time/publish_s": 0.0, "time/orchestration_s": 1.0, "time/rollout_s": 8.0}
    overlapped = facts(steps={1: step})
    assert hidden_rollouts(overlapped) == " Another 5 s of rollouts ran behind training and are not drawn."
    parts = step | {"time/rollout_wait_s": 3.0, "train/update_s": 6.0, "train/plan_s": 2.0}
    told = plots.times(facts(steps={1: parts})) or ""
    assert (
        "rollouts 30%, select 0%, plan 20%, forward 0%, backward 0%, optimiser 40%, save 0%, publish 0%, orchestration 10%"
        in told
    )
    assert hidden_rollouts(facts(steps={1: step | {"time/rollout_s": 3.0}})) == ""
