"""Flow: measure the strength of policy versions: on held-out positions, or in matches of whole games."""

import asyncio
from pathlib import Path
from typing import Any

from prefect import flow

from decoding.codec import Codec
from evaluation.contestants import known_version
from evaluation.settings import EvaluationSettings, MatchSettings
from evaluation.strength import POLICY
from flows.open_run import make_engine, prepare_cache, prepare_model
from flows.play_match import play_match_of
from flows.run_names import evaluation_name
from flows.run_settings import settings_of
from flows.thread_plan import apply_threads
from inference.host import EngineHost
from rollouts.fork import Tokens
from storage.adapters import read_adapter
from storage.runs import RunPaths
from tasks.artifacts import show_scores
from tasks.evaluation import evaluate_player
from telemetry.progress import reporter


@flow(name="evaluate-policy", flow_run_name=evaluation_name)
async def evaluate_policy(
    run: str,
    version: int = -1,
    runs_root: Path = Path("runs"),
    evaluation: EvaluationSettings | None = None,
    match: MatchSettings | None = None,
) -> dict[str, Any]:
    """Score `version` of `run` against each kind of opponents; or play `match`.

    Args:
        run: Name of the run, its folder under `runs_root`.
        version: Policy version; 0 is the base model, -1 the newest.
        runs_root: Folder of all runs.
        evaluation: How to measure; left out, as the run itself does.
        match: Whole games between several players instead, which it names; `version` then says nothing.

    Raises:
        InputError: no such run or version, or a match that cannot be played.
    """
    if match is not None:
        return await play_match_of(run, Path(runs_root), match)
    paths = RunPaths(Path(runs_root) / run)
    settings = settings_of(paths).model_copy(update={"runs_root": Path(runs_root)})
    evaluation = evaluation or settings.evaluation
    version = known_version(paths, run, version)
    apply_threads(max(settings.threads))
    cache, model = await prepare_cache(settings), await prepare_model(settings)
    host, engine = EngineHost(), make_engine(settings.inference.for_evaluation, model)
    try:
        reporter().say("starting the engine")
        await asyncio.wait_for(host.run(engine.start()), settings.inference.start_timeout_s)
        if version:
            adapter = read_adapter(paths, version)
            await host.run(engine.publish(version, adapter.path, adapter.adapter_hash))
        tokens, scores = Tokens(Codec(model), settings.prompts), {}
        for opponents in evaluation.opponents:
            scores[opponents] = await evaluate_player(
                f"v{version}", POLICY, opponents, cache.held_out, evaluation, host, engine, tokens
            )
    finally:
        await host.run(engine.close())
        host.close()
    await show_scores(run, version, scores)
    return {
        "run": run,
        "policy_version": version,
        "against": {
            name: {
                "score": round(score.mean, 4),
                "ci": [round(end, 4) for end in score.interval],
                "forks": score.forks,
            }
            for name, score in scores.items()
        },
        "orders_rejected": sum(score.orders_rejected for score in scores.values()),
    }
