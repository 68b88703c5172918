"""Checks across packages: an error names contradicting settings, their values and a cure."""

from entente.game.scripted import check_player
from entente.inference.engine_cards import engine_family
from entente.players.endpoint import read_endpoint
from entente.rollouts.league import slots_for
from entente.settings.run_settings import PipelineSettings, RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.extensions import check_named
from entente.training.settings import LOSSES
from storage.rewards import check_reward_weights
from storage.runs import check_run_name
from storage.settings import StorageSettings


def check_settings(settings: RunSettings) -> None:
    """Raise InputError, with settings, values and fix, if settings contradict each other or a player, loss or reward is
    missing."""
    if settings.run:
        check_run_name(settings.run)
    if "\0" in str(settings.runs_root):
        raise InputError(f"runs_root {str(settings.runs_root)!r} cannot name a folder: remove the zero byte")
    if settings.training.seed not in (0, settings.seed):
        raise InputError(
            f"training.seed {settings.training.seed} differs from seed {settings.seed}, and a run has one seed: set seed alone"
        )
    _check_pipeline(settings.pipeline, settings.storage)
    for name in {
        *settings.rollouts.scripted_opponents,
        *settings.evaluation.opponents,
        *settings.cache.players,
    }:
        check_player(name)
    thinking, longest = settings.prompts.thinking_tokens, settings.inference.max_model_length
    if thinking >= longest:
        raise InputError(
            f"prompts.thinking_tokens {thinking} leaves no room for a prompt and its orders within inference.max_model_length "
            f"{longest}: lower the one or raise the other"
        )
    if not settings.evaluation.opponents:
        raise InputError("evaluation.opponents is empty, and the first of them gives the score: name one, such as 'random'")
    wanted, held_out = settings.evaluation.positions, settings.cache.held_out_snapshots
    if wanted > held_out:
        raise InputError(
            f"evaluation.positions {wanted} exceeds cache.held_out_snapshots {held_out}: lower the one or raise the other"
        )
    horizons, steps = settings.rollouts.horizons, settings.steps
    if horizons and horizons[0][0] > steps:
        raise InputError(
            f"rollouts.horizon_schedule {settings.rollouts.horizon_schedule!r} begins at step {horizons[0][0]}, after the last "
            f"of {steps} steps: let it begin earlier, or raise steps"
        )
    if settings.prompts.examples and settings.inference.model == "tiny":
        raise InputError(
            "prompts.examples are for a model that was not trained on the game, and a tiny model is: set prompts.examples to 0, "
            "or name another inference.model"
        )
    _check_slots(settings)
    _check_endpoints(settings)
    _ = settings.threads  # raises InputError if they do not fit the cores
    check_objective(settings)


def check_objective(settings: RunSettings) -> None:
    """Raise InputError if the loss or a reward component exists neither here nor in an installed package; does not load the
    loss."""
    check_reward_weights(settings.storage.reward_weights)
    try:
        check_named("loss", settings.training.loss, LOSSES)
    except InputError as error:
        raise InputError(f"training.loss: {error}") from error
    if settings.storage.selection:
        from storage.index import check_selection  # imports DuckDB only where needed

        check_selection(settings.storage)


def try_loss(name: str) -> None:
    """Load and try a user's loss; raises InputError if it is unusable. Imports torch, so set its number of threads before."""
    if name in LOSSES:
        return
    from entente.training.losses import policy_loss

    try:
        policy_loss(name)
    except InputError as error:
        raise InputError(f"training.loss: {error}") from error


def _check_endpoints(settings: RunSettings) -> None:
    pipeline, endpoints = settings.pipeline, settings.rollouts.endpoints
    for name in endpoints:
        read_endpoint(name)
    if endpoints and pipeline.task_runner != "threads":
        raise InputError(
            f"rollouts.opponents names '{endpoints[0]}', and pipeline.task_runner is '{pipeline.task_runner}': one process asks "
            "the endpoints, because there is one token budget and one file of answers; leave the one or the other out"
        )


def _check_slots(settings: RunSettings) -> None:
    inference, lag = settings.inference, settings.storage.max_policy_lag
    opponents = slots_for(settings.rollouts, lag)
    needed = lag + 2 + opponents
    if not inference.urls and engine_family(inference) == "torch":
        return
    if settings.training.lora_rank > inference.adapter_rank:
        raise InputError(
            f"training.lora_rank {settings.training.lora_rank} exceeds inference.adapter_rank {inference.adapter_rank}: "
            f"set adapter_rank to {settings.training.lora_rank}"
        )
    if inference.adapter_slots < needed:
        raise InputError(
            f"inference.adapter_slots {inference.adapter_slots} cannot hold the versions that storage.max_policy_lag "
            f"{lag} keeps in play{f' and {opponents} past versions as opponents' if opponents else ''}: set adapter_slots to at "
            f"least {needed}"
        )


def _check_pipeline(pipeline: PipelineSettings, storage: StorageSettings) -> None:
    if pipeline.buffer_depth > storage.max_policy_lag:
        raise InputError(
            f"pipeline.buffer_depth {pipeline.buffer_depth} exceeds storage.max_policy_lag {storage.max_policy_lag}: "
            f"rows would be too old to train on; set buffer_depth to at most {storage.max_policy_lag}, "
            "or raise max_policy_lag"
        )
    if pipeline.dask_address and pipeline.task_runner != "dask":
        raise InputError(
            f"pipeline.dask_address '{pipeline.dask_address}' is for pipeline.task_runner 'dask', not "
            f"'{pipeline.task_runner}': set one of the two"
        )
