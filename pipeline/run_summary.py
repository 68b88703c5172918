"""The summary of a run: the figures in `summary.json`, which the command line prints."""

from typing import Any

from evaluation.strength import Score
from pipeline.run_settings import RunSettings
from storage.totals import Totals


def run_summary(
    settings: RunSettings, totals: Totals, scores: dict[str, Score], orchestration_share: float, wall_s: float
) -> dict[str, Any]:
    """Figures of a finished run.

    Args:
        totals: counted from the run's files, whichever process wrote them.
        scores: by label, such as "base" or "trained_vs_mover".
        orchestration_share: share of the steps' time spent in Prefect and the flow, from 0 to 1.
        wall_s: seconds of the run.
    """
    summary: dict[str, Any] = {}
    if "base" in scores:
        summary |= {"positions": scores["base"].positions, "source_games": scores["base"].source_games}
    for label, score in scores.items():
        name = label.replace("_vs_", "_score_vs_") if "_vs_" in label else f"{label}_score"
        summary[name] = round(score.mean, 4)
        if label.startswith(("base", "trained")):
            summary[name.replace("_score", "_ci")] = score.estimate.rounded()
    return summary | {
        "steps": settings.steps,
        "wall_s": round(wall_s, 1),
        "decisions": totals.decisions,
        "max_policy_lag_seen": totals.max_policy_lag,
        "orders_rejected": totals.orders_rejected + sum(score.orders_rejected for score in scores.values()),
        "orchestration_share": round(orchestration_share, 4),
        "run": str(settings.paths.root),
    }
