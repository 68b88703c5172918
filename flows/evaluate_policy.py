"""Flow: measure policy versions on held-out positions, or in matches."""

from pathlib import Path
from typing import Any

from prefect import flow

from entente.evaluation.contestants import resolve_contestant, resolve_version
from entente.evaluation.score_files import read_scores
from entente.evaluation.settings import EvaluationSettings, MatchSettings, PlaySettings
from entente.evaluation.strength import POLICY
from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from flows.given_parameters import PINNED, check_parameters, named_after
from flows.open_players import open_players
from flows.open_run import prepare_cache
from flows.play_match import play_match_of
from storage.runs import RunPaths, check_name
from tasks.artifacts import show_sentences
from tasks.evaluation import evaluate_player


@flow(name="evaluate-policy", flow_run_name=named_after("evaluate", "run"), **PINNED)
async def evaluate_policy(
    run: str,
    version: int = -1,
    runs_root: Path = Path("runs"),
    evaluation: EvaluationSettings | None = None,
    match: MatchSettings | None = None,
    play: PlaySettings | None = None,
) -> dict[str, Any]:
    """Score `version` of `run` against each kind of opponents, or play a match instead.

    Args:
        run: Name of the run, its folder under `runs_root`; empty for a match in which no version of a run plays.
        version: Policy version; 0 is the base model, -1 the newest.
        runs_root: Folder of all runs.
        evaluation: Settings of the measurement; default: the run's own.
        match: Play whole games between the players that it names instead; `version` is then ignored.
        play: How the version plays in the score: its temperature, or by search; default: it samples at temperature 1.

    Raises:
        InputError: no such run or version, a match that cannot be played, or one with settings of a score.
    """
    check_parameters(runs_root, runs=[run], players=(*match.players, match.opponents) if match is not None else ())
    if match is not None:
        # Prefect's form sends the defaults of a part that was opened and not changed.
        if evaluation not in (None, EvaluationSettings()) or play not in (None, PlaySettings()):
            raise InputError(
                "evaluation and play belong to the score on held-out positions, and this is a match: leave them out, and set "
                "temperature, strategy and search in match"
            )
        return await play_match_of(run, runs_root, match)
    paths = RunPaths(runs_root / check_name(run, "run"))
    settings = settings_of(paths).model_copy(update={"runs_root": runs_root})
    evaluation, play = evaluation or settings.evaluation, play or PlaySettings()
    version = resolve_version(paths, run, version)
    player = resolve_contestant(f"v{version}", run, runs_root)
    held_out = (await prepare_cache(settings)).held_out
    scored = {gain.snapshot_id for record in read_scores(paths).values() for gain in record.score.gains}
    scores = {}
    async with open_players([player], runs_root, play) as opened:
        for opponents in evaluation.opponents:
            scores[opponents] = await evaluate_player(
                f"v{version}",
                player.name if play.strategy == "search" else POLICY,
                opponents,
                held_out,
                evaluation,
                opened.host,
                opened.deciders[player.name],
                play.temperature,
            )
    sentences = [f"policy version {version} against {name}: {score.describe()}" for name, score in scores.items()]
    if scored - {snapshot.snapshot_id for snapshot in held_out}:
        # As after its state cache was lost, and built again by another release.
        sentences.append("the run's own scores are from other held-out positions than these: do not compare them")
    played = f"{version}{play.how() and ', ' + play.how()}"
    await show_sentences(f"score-{run}-v{played}", f"{run}: strength of policy version {played}", lambda: sentences)
    return {
        "run": run,
        "policy_version": version,
        "how": play.how(),
        "notes": sentences,
        "against": {
            name: {
                "score": round(score.mean, 4),
                "ci": score.estimate.rounded(),
                "forks": score.forks,
                "positions": score.positions,
                "source_games": score.source_games,
            }
            for name, score in scores.items()
        },
        "orders_rejected": sum(score.orders_rejected for score in scores.values()),
    }
