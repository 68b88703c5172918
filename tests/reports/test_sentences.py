"""Claims about what the report says in words."""

import math
from dataclasses import replace
from typing import Any

import pytest

from entente.evaluation.score_files import ScoreRecord
from entente.evaluation.settings import EvaluationSettings
from entente.reports.page import named_scores
from entente.reports.sentences import mismatch, verdict
from tests.made_scores import made_record, made_score
from tests.reports.conftest import facts


def record(mean: float, low: float, high: float, version: int = 0, player: str = "policy", games: int = 7) -> ScoreRecord:
    score = made_score(mean, low=low, high=high, forks=8, positions=8, source_games=games)
    settings = EvaluationSettings(positions=4, horizon_years=2)
    return made_record("", score, player=player, opponents="mover", policy_version=version, settings=settings)


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        pytest.param((1.0, 0.81, 1.2), "do not overlap: training helped", id="above"),
        pytest.param((1.0, 0.79, 1.2), "overlap: these positions alone do not separate", id="overlapping"),
        pytest.param((0.1, 0.0, 0.2), "do not overlap: training hurt", id="below"),
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


@pytest.mark.parametrize(
    "changed",
    [{"settings": EvaluationSettings(positions=4, horizon_years=1)}, {"code": {"entente.game": "another release"}}],
    ids=["other settings", "another program"],
)
def test_the_verdict_compares_no_scores_that_were_measured_differently(changed: dict[str, Any]):
    """A resumed run scores the base at once, and the trained policy after its last step."""
    scores = {
        "base": replace(record(0.2, 0.1, 0.3), **changed),
        "trained": record(1.0, 0.9, 1.2, version=4),
        "random": replace(record(0.4, 0.3, 0.5, player="random"), **changed),
    }
    words = verdict(scores)
    assert "gains +1.00 [+0.90, +1.20] supply centres in 2 game years" in words and "so the two are not compared" in words
    assert "0.20" not in words and "0.40" not in words and "helped" not in words
    named = [name for name, _ in named_scores(scores)]
    assert named == ["random, measured otherwise", "base, measured otherwise", "trained, version 4"]


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


@pytest.mark.parametrize(("rounded", "kind", "most"), [(0.0, "largest", "nan"), (1.0, "mean", "0.5")])
def test_a_mismatch_that_began_after_the_start_is_in_the_report(rounded: float, kind: str, most: str):
    alike = {"mismatch/tokens": 9.0, "mismatch/mean": 1e-8, "mismatch/p99": 1e-7, "mismatch/largest": 1e-7}
    off = alike | {"mismatch/mean": 0.5, "mismatch/largest": math.nan}
    words = mismatch(facts(mismatch=alike | {"mismatch/rounded": rounded}, steps={20: alike, 21: {}, 40: off, 60: alike}))
    assert words.endswith(f". In 3 later comparisons the {kind} difference was at most {most}.")
