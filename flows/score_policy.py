"""Scores of a run (base model, trained version, versions between, scripted players), and its summary. Each is measured once
and stored in a file."""

from typing import Any

from entente.evaluation.score_files import ScoreRecord, read_score, track_label, write_score
from entente.evaluation.strength import POLICY, Score
from entente.players.policy import PolicyPlayer
from entente.reports.read_run import read_run
from entente.settings.find_model import TINY
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import DataError
from entente.telemetry.progress import reporter
from entente.training.settings import TINY_TEACHER
from storage.control import code_of_play
from storage.files import set_aside
from storage.ledger import Totals
from storage.runs import RunPaths
from tasks.evaluation import evaluate_player
from tasks.open_objects import OpenRun


def run_summary(settings: RunSettings, totals: Totals, scores: dict[str, Score], wall_s: float) -> dict[str, Any]:
    """Figures of a finished run. `scores` are by label ("base", "trained_vs_mover", ...); `orchestration_share` is the
    fraction of the logged steps' time spent in Prefect and the flow, 0 to 1; `wall_s` includes the steps of earlier processes.
    `totals` lack the shards that retention removed, and the metrics lack steps that a kill left unlogged: the larger count is
    taken."""
    summary, run = dict[str, Any](), read_run(settings.paths)
    rejected = max(totals.orders_rejected, int(run.total("rollout/orders_rejected")))
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
        "decisions": max(totals.decisions, run.decisions),
        "max_policy_lag_seen": totals.max_policy_lag,
        "orders_rejected": rejected + sum(score.orders_rejected for score in scores.values()),
        **({"orchestration_share": round(run.share("time/orchestration_s", "time/step_s"), 4)} if run.steps else {}),
        "run": str(settings.paths.root),
    }


def earlier_seconds(paths: RunPaths, step: int) -> float:
    """Wall time of the steps up to `step`, which earlier processes did before this one resumed the run; a step whose time a kill
    left unlogged counts as none."""
    return sum(figures["time/step_s"] for number, figures in read_run(paths).steps.items() if number <= step)


async def score_policy(resources: OpenRun, settings: RunSettings, label: str) -> dict[str, Score]:
    version = 0 if label == "base" else settings.steps
    labels = {label if place == 0 else f"{label}_vs_{name}": name for place, name in enumerate(settings.evaluation.opponents)}
    return {each: await _score(resources, settings, each, POLICY, opponents, version) for each, opponents in labels.items()}


async def score_scripted(resources: OpenRun, settings: RunSettings) -> dict[str, Score]:
    """Score two scripted players, by label; `teacher` is one that the model imitated."""
    opponents = settings.evaluation.opponents[0]
    players = {"random": "random", "teacher" if settings.inference.model == TINY else TINY_TEACHER: TINY_TEACHER}
    return {label: await _score(resources, settings, label, player, opponents, 0) for label, player in players.items()}


def due(settings: RunSettings, version: int) -> bool:
    """True if this version is scored during training. The last one is always scored."""
    every = settings.evaluation.every
    return bool(every) and version % every == 0 and version < settings.steps


def missed(resources: OpenRun, settings: RunSettings) -> bool:
    """True if the version from which the run resumes is due and has no score, because a kill prevented it."""
    version = resources.resume_point.step_done
    return version > 0 and due(settings, version) and _known(resources, track_label(version)) is None


async def score_version(resources: OpenRun, settings: RunSettings, version: int) -> dict[str, float]:
    """Score the served version during training. Returns `score/eval` metrics."""
    with resources.spans.span("score"):
        score = await _score(resources, settings, track_label(version), POLICY, settings.evaluation.opponents[0], version)
    figures = {"score/eval": score.mean, "score/eval_version": float(version)}
    if score.estimate.interval is not None:
        figures["score/eval_low"], figures["score/eval_high"] = score.estimate.interval
    return figures


async def _score(resources: OpenRun, settings: RunSettings, label: str, player: str, opponents: str, version: int) -> Score:
    known = _known(resources, label)
    code = code_of_play((player, opponents))
    asked = (player, opponents, version, settings.evaluation.question)
    if known is not None and (known.player, known.opponents, known.policy_version, known.settings.question) == asked:
        if known.code == code:
            return known.score
        reporter().say(f"the score '{label}' was measured by a program that may play differently: measuring it again")
    async with resources.engine_alone():
        score = await evaluate_player(
            label,
            player,
            opponents,
            resources.cache.held_out,
            settings.evaluation,
            resources.host,
            PolicyPlayer(resources.engine, resources.tokens) if player == POLICY else None,
            touched=resources.paths.scores,
        )
    record = ScoreRecord(
        label=label,
        player=player,
        opponents=opponents,
        policy_version=version,
        settings=settings.evaluation,
        score=score,
        code=code,
    )
    write_score(resources.paths, record)
    return score


def _known(resources: OpenRun, label: str) -> ScoreRecord | None:
    try:
        return read_score(resources.paths, label)
    except DataError as error:
        reporter().say(f"set aside and measured again: {error}")
        set_aside(resources.paths.scores / f"{label}.json")
        return None
