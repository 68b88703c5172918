"""Estimates of a command before it starts: work, tokens, time, memory and disk.

Downloads and writes nothing, and imports neither Prefect nor vLLM. In names, `bytes` is the unit, `_at_most` means a bound and
`_about` an estimate.
"""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from entente.decoding.architectures import read_architecture
from entente.decoding.codec import Codec
from entente.evaluation.settings import POWERS_PER_POSITION, EvaluationSettings
from entente.game.snapshot import POWERS
from entente.inference.choose_engine import engine_here
from entente.inference.engine_cards import unused_card
from entente.inference.memory_plan import Machine, ModelShape, plan_memory, this_machine
from entente.players.policy import Tokens
from entente.reports.read_run import read_run
from entente.rollouts.rehearse_forks import BytesAsTokens, Rehearsal, rehearse, some_positions
from entente.settings.check_settings import check_settings, try_loss
from entente.settings.find_model import TINY, check_room, model_for_plan, shape_of, trainer_bytes, trainer_gpu_bytes
from entente.settings.layers import check_prompts, check_what_is_there, rate_warning, settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.cards import CardPlan, torch_problem
from entente.telemetry.errors import InputError
from entente.telemetry.machine import usable_cores
from entente.training.settings import KEEP_CHECKPOINTS
from state_cache.store import find_cache, open_cache
from storage.adapters import published_versions
from storage.league_files import LEAGUE_EVERY
from storage.retention import GB, MILESTONE_EVERY, REPLAY_STEPS
from storage.run_base import resumed_base
from storage.runs import CACHE_FOLDER, check_runs_root, runs_in
from tasks.dask_rollouts import check_scheduler
from tasks.rollout_queue import groups_per_task

Forecast = dict[str, Any]
PHASES_A_YEAR = 5
"""Upper bound of phases in a game year: two of movement, each with retreats, and adjustments."""
_ADAPTER_FILES_BYTES, _GENERATORS_BYTES, _FILE_BYTES = 12_000, 10_000, 12_000
"""Approximate sizes of an adapter's files without weights, of random generators in a checkpoint, of a shard without rows."""


def check_train(settings: RunSettings, *, resume: bool) -> tuple[CardPlan, Path | None]:
    """Cards and the model's folder, None if it is not on this machine; raises InputError where the run itself would."""
    check_settings(settings)
    if not resume:
        check_prompts(settings)
    try_loss(settings.training.loss)
    check_runs_root(settings.runs_root, settings.run)
    check_what_is_there(settings, resume=resume)
    if settings.pipeline.task_runner == "dask":
        check_scheduler(settings.pipeline.dask_address)
    model = model_for_plan(settings)
    cards = check_room(settings, trains=True)
    if resume and model is not None:
        resumed_base(settings.paths, model)
    if model is not None:
        Tokens(Codec(model), settings.prompts).check_thought(settings.inference.max_model_length)
    return cards, model


def plan_train(settings: RunSettings, *, resume: bool = False) -> Forecast:
    """Plan a training run, or with `resume` its remaining steps; raises InputError where the run itself would."""
    cards, model = check_train(settings, resume=resume)
    machine, shape = this_machine(cards), shape_of(settings)
    cache = find_cache(settings.runs_root / CACHE_FOLDER, settings.cache)
    positions = some_positions(settings.cache) if cache is None else open_cache(cache).train
    tokens = Tokens(BytesAsTokens() if model is None else Codec(model), settings.prompts)
    done = max(published_versions(settings.paths), default=0) if resume else 0
    steps = max(0, settings.steps - done)
    rollouts, samples = settings.rollouts.at(settings.steps), {}
    at_horizon = Counter(settings.rollouts.at(step).horizon_years for step in range(done + 1, settings.steps + 1))
    for years in sorted({*at_horizon, rollouts.horizon_years}):
        at = rollouts.model_copy(update={"horizon_years": years})
        samples[years] = rehearse(positions, tokens, at, settings.inference.max_model_length, settings.seed)
    sample = samples[rollouts.horizon_years]  # memory and the rate of decisions are those of the last horizon
    forks = steps * rollouts.start_groups * rollouts.forks_per_group
    powers = 1 if rollouts.policy_powers == "one" else len(POWERS)
    forks_a_step = rollouts.start_groups * rollouts.forks_per_group
    decisions = round(sum(count * forks_a_step * samples[years].decisions_per_fork for years, count in at_horizon.items()))
    fork_years = sum(count * years for years, count in at_horizon.items())
    row_bytes = sum(count * forks_a_step * samples[years].fork_bytes for years, count in at_horizon.items())
    unique_tokens = sum(count * samples[years].unique_tokens for years, count in at_horizon.items()) / max(1, steps)
    name = settings.run or f"{Path(settings.inference.model).name.lower()}-seed{settings.seed}-<time>"
    return {
        "command": "train",
        "run": {"name": name, "folder": str(settings.runs_root / name)} | ({"steps_done": done} if resume else {}),
        "work": {
            "steps": steps,
            "forks": forks,
            "decisions_at_most": forks_a_step * powers * PHASES_A_YEAR * fork_years,
            "decisions_about": decisions,
            "forks_of_both_scores": 2 * _scored_forks(settings.evaluation),
        },
        "training": {
            "learning_rate": f"{settings.training.learning_rate:g}",
            "schedule": settings.training.rate_schedule,
            "warm_up_steps": settings.training.warm_up_steps,
            "updates_of_a_step": settings.training.updates_per_step,
        }
        | ({"warning": warning} if shape and (warning := rate_warning(settings.training.learning_rate, shape.hidden)) else {}),
        "tokens": _tokens(settings, sample, decisions, exact=model is not None),
        "time": _time(settings, steps, decisions) or _first_guess(settings, steps, model, unique_tokens, machine),
        "memory": _memory(
            settings, shape, machine, trainer_bytes(settings, shape, machine), trainer_gpu_bytes(settings, shape, machine)
        ),
        "disk": _disk(settings, steps, row_bytes, shape, settings.runs_root / name),
        "uses": _uses(settings, cards, model, cache) | ({"prompts": tokens.form.chat.description} if model else {}),
    }


def free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _scored_forks(evaluation: EvaluationSettings) -> int:
    return evaluation.positions * POWERS_PER_POSITION * len(evaluation.opponents)


def _tokens(settings: RunSettings, sample: Rehearsal, decisions: int, *, exact: bool) -> Forecast:
    longest = settings.inference.max_model_length
    plan: Forecast = {
        "request_at_most": longest,
        "prompt_about": round(sample.prompt_tokens),
        "completion_about": round(sample.completion_tokens),
        "prompts_of_the_run_about": round(sample.prompt_tokens * decisions),
        "completions_of_the_run_about": round(sample.completion_tokens * decisions),
        "basis": "some forks with uniformly random orders, with this model's tokenizer"
        if exact
        else "some forks with uniformly random orders; upper bounds, since each byte counts as a token without a tokenizer",
    }
    if exact and sample.longest_request > longest:
        plan["warning"] = (
            f"a request may need {sample.longest_request} tokens, more than inference.max_model_length {longest}: "
            "its fork would fail; raise it"
        )
    return plan


def _time(settings: RunSettings, steps: int, decisions: int) -> Forecast:
    for paths in reversed(runs_in(settings.runs_root)):
        try:
            same = settings_of(paths).inference.model == settings.inference.model
        except InputError:
            continue
        past = [figures for figures in read_run(paths).steps.values() if figures.get("rollout/decisions")] if same else []
        if past:
            seconds, sampled = (sum(figures.get(name, 0.0) for figures in past) for name in ("time/step_s", "rollout/decisions"))
            whole = decisions * seconds / sampled
            return _times(whole, steps, f"seconds a decision of run '{paths.root.name}'")
    return {}


def _first_guess(settings: RunSettings, steps: int, model: Path | None, unique_tokens: float, machine: Machine) -> Forecast:
    """`unique_tokens`: of a start group, mean over the steps."""
    if model is None or machine.gpu_total or machine.trainer_gpu[1] or settings.inference.urls:
        return {"steps": "unknown until a run with this model is here"}
    from entente.training.first_guess import step_seconds

    sampled = settings.rollouts.start_groups * unique_tokens
    one = step_seconds(read_architecture(model), sampled, overlaps=settings.pipeline.buffer_depth > 0 and usable_cores() > 1)
    return _times(steps * one, steps, "the model's arithmetic and the rate at which this machine multiplies matrices")


def _times(whole_s: float, steps: int, basis: str) -> Forecast:
    return {"step_s_about": round(whole_s / max(1, steps), 1), "steps_s_about": round(whole_s), "basis": basis}


def _memory(settings: RunSettings, shape: ModelShape | None, machine: Machine, trainer: int, trainer_gpu: int) -> Forecast:
    if shape is None:
        return {"needed": "unknown: the model is not here yet, or its config has no shape", "available_bytes": machine.memory}
    if settings.inference.urls:
        return {"trainer_process_bytes_about": trainer, "available_bytes": machine.memory}
    plan = plan_memory(shape, settings.inference, machine, trainer=trainer)
    rows: Forecast = {
        "engine_process_bytes_about": plan.needed - trainer,
        **({"trainer_process_bytes_about": trainer} if trainer else {}),
        "needed_bytes_about": plan.needed,
        "available_bytes": machine.memory,
        "longest_sequences_held": plan.whole_sequences,
    }
    on_engine_card = trainer_gpu if machine.trainer_total is None else 0
    if plan.needed > machine.memory or plan.gpu_needed + on_engine_card > machine.gpu_free:
        rows["warning"] = (
            "the run may need more memory than is there: lower inference.max_sequences or inference.max_model_length, or set "
            "training.gradient_checkpointing"
        )
    if machine.gpu_total:
        rows |= {"gpu_reserved_bytes": plan.gpu_needed, "gpu_free_bytes": machine.gpu_free}
    if machine.trainer_gpu[1]:
        rows |= {"trainer_gpu_bytes_at_least": trainer_gpu, "trainer_gpu_free_bytes": machine.trainer_gpu[0]}
    return rows


def _disk(settings: RunSettings, steps: int, rows: float, shape: ModelShape | None, folder: Path) -> Forecast:
    tasks = -(-settings.rollouts.start_groups // groups_per_task(settings))
    shards = round(rows) + steps * tasks * _FILE_BYTES
    if limit := round(settings.retention.shards_gb * GB):  # beyond it those of the newest steps stay
        shards = min(shards, max(limit, shards * REPLAY_STEPS // max(1, steps)))
    sizes = {"shards_bytes_about": shards}
    if shape is not None:
        training = settings.training
        adapter = 4 * shape.lora_parameters(training.lora_rank, training.lora_targets) + _ADAPTER_FILES_BYTES
        # Each step publishes one; a run keeps the newest, and of the others milestones and those that a score or league needs.
        lasting = [MILESTONE_EVERY, settings.evaluation.every, LEAGUE_EVERY * settings.rollouts.has_league]
        versions = range(settings.steps - steps + 1, settings.steps + 1)
        needed = sum(any(every and version % every == 0 for every in lasting) for version in versions)
        kept = min(steps, settings.retention.keep_adapters + needed)
        sizes["adapters_bytes_about"] = kept * adapter
        sizes["checkpoints_bytes_about"] = min(steps, KEEP_CHECKPOINTS) * (3 * adapter + _GENERATORS_BYTES)
    total, free = sum(sizes.values()), free_bytes(folder)
    plan: Forecast = {**sizes, "run_bytes_about": total, "free_bytes": free}
    return plan | ({"warning": "the run may not fit the disk"} if total > free else {})


def _uses(settings: RunSettings, cards: CardPlan, model: Path | None, cache: Path | None) -> Forecast:
    engine, unused = settings.inference, unused_card(settings.inference)
    _, reason = engine_here(engine)
    to_make = "to be made from its recipe" if engine.model == TINY else "to be downloaded from the hub, which has it"
    plan: Forecast = {"engine": f"vLLM servers at {', '.join(engine.urls)}" if engine.urls else reason}
    for name, some in (("engine_cards", cards.engine), ("trainer_cards", cards.trainer)):
        plan |= {name: ", ".join(card.text for card in some)} if some else {}
    plan |= {"model": f"found: {model}" if model else to_make, "state_cache": f"found: {cache}" if cache else "to be built"}
    if not unused and settings.training.device != "cpu":
        unused = "; ".join(torch_problem() or ())
    return plan | ({"warning": unused} if unused else {})
