"""Two scores are compared start by start, and a difference is claimed only where its interval excludes 0."""

import random

import numpy as np
import pytest

from entente.evaluation.paired import ScoreDifference, score_difference
from entente.evaluation.score_files import ScoreRecord
from entente.evaluation.settings import EvaluationSettings
from entente.evaluation.strength import Gain
from tests.made_scores import made_record, made_score

SETTINGS = EvaluationSettings(positions=24)


def record(gains: dict[str, float], **changes) -> ScoreRecord:
    """A score with these gains by position; two positions are of one source game."""
    kept = tuple(
        Gain(snapshot_id=name, game_id=f"game-{int(name) // 2}", power="FRANCE", centres=centres)
        for name, centres in gains.items()
    )
    mean = float(np.mean(list(gains.values()) or [0.0]))
    score = made_score(mean, forks=len(kept), positions=24, source_games=12, gains=kept)
    return made_record(score=score, **{"opponents": "mover", "policy_version": 2, "settings": SETTINGS, **changes})


def gains_of(seed: int, more: float = 0.0) -> dict[str, float]:
    """Positions of very different worth, which both players share, and a small noise of each player's own."""
    worth, own = random.Random(0), random.Random(seed)
    return {str(place): worth.choice([-4.0, 0.0, 4.0]) + own.choice([-0.25, 0.25]) + more for place in range(24)}


def difference(first: ScoreRecord, second: ScoreRecord) -> ScoreDifference:
    found = score_difference(first, second)
    assert isinstance(found, ScoreDifference), found
    return found


def test_the_difference_is_taken_start_by_start_and_whole_source_games_are_resampled():
    first, second = record(gains_of(1)), record(gains_of(2, more=0.5))
    found = difference(first, second)
    by_game = [
        [b.centres - a.centres for a, b in zip(first.score.gains, second.score.gains, strict=True)][n : n + 2]
        for n in range(0, 24, 2)
    ]
    assert found.difference.mean == pytest.approx(np.mean(by_game))
    assert (found.forks, found.difference.clusters, found.difference.excludes_zero) == (24, 12, True)
    sampled = np.random.default_rng(3).integers(0, 12, (4000, 12))
    low, high = np.quantile(np.array(by_game).mean(axis=1)[sampled].mean(axis=1), [0.025, 0.975])
    assert found.difference.interval == pytest.approx((low, high), abs=0.12)
    assert found.difference.interval[1] - found.difference.interval[0] < 0.5, "the worth of the positions is not in it"


def test_starts_are_matched_by_position_and_power_whatever_their_order():
    gains = gains_of(1)
    first, turned = record(gains), record(dict(reversed(gains.items())))
    assert difference(first, turned).difference == difference(first, first).difference
    assert difference(first, first).difference.mean == 0
    half = record({name: value for name, value in gains.items() if int(name) < 14})
    assert difference(first, half).forks == 14


def test_a_difference_whose_interval_holds_0_is_not_shown():
    found = difference(record(gains_of(1)), record(gains_of(2, more=0.02)))
    low, high = found.difference.interval or (1, 1)
    assert low < 0 < high and not found.difference.excludes_zero
    assert found.forks_to_show is not None and found.forks_to_show > 24


@pytest.mark.parametrize(
    ("other", "why"),
    [
        pytest.param({"opponents": "random"}, "other opponents, mover and random", id="opponents"),
        pytest.param({"code": {"entente.game": "another"}}, "programs that may play differently", id="program"),
        pytest.param(
            {"settings": SETTINGS.model_copy(update={"horizon_years": 2})}, "other horizons in years, 1 and 2", id="horizon"
        ),
    ],
)
def test_scores_of_other_questions_are_not_paired(other: dict, why: str):
    assert score_difference(record(gains_of(1)), record(gains_of(1), **other)) == f"they were measured with {why}"
