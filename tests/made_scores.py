"""Scores that nobody played for. What a test does not give is that of one fork of the policy against random players."""

from typing import Any

from entente.evaluation.score_files import ScoreRecord
from entente.evaluation.settings import EvaluationSettings
from entente.evaluation.strength import POLICY, Score


def made_score(mean: float = 0.5, margin: float | None = None, **given: Any) -> Score:
    """A score, with an interval that reaches so far to each side of its mean, or with none."""
    low, high = (None, None) if margin is None else (mean - margin, mean + margin)
    counts = {"forks": 1, "positions": 1, "source_games": 1, "orders_rejected": 0}
    return Score(**{"mean": mean, "low": low, "high": high, **counts, **given})


def made_record(label: str = "trained", score: Score | None = None, **given: Any) -> ScoreRecord:
    """The record of a score, by default of `made_score()`."""
    usual = {"player": POLICY, "opponents": "random", "policy_version": 0, "settings": EvaluationSettings()}
    return ScoreRecord(**{"label": label, "score": score or made_score(), **usual, **given})
