"""Plans of commands: what a command will do, in figures, before anything is started.

Checks that need no server, no engine and no loaded model are made here. Neither Prefect nor vLLM is loaded, and nothing is
downloaded or written. A plan is a tree of sections. In names, `bytes` is the unit, `_at_most` means a bound and `_about` an
estimate.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.settings import EvaluationSettings
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.snapshot import POWERS, Snapshot
from inference.choose_engine import engine_kind
from inference.engine_cards import engine_cards, has_cuda, unused_card, vllm_build
from inference.memory_plan import ModelShape, check_memory, read_shape, this_machine
from inference.settings import KEY_VARIABLE, InferenceSettings
from inference.start_engine import start_limit_s
from pipeline.plans.find_model import (
    TINY,
    check_length,
    find_tiny,
    model_for_plan,
    model_shape,
    tiny_shape,
    trainer_bytes,
    trainer_bytes_about,
    trainer_gpu_bytes,
)
from pipeline.plans.plan_memory import adapter_forecast, memory_forecast
from pipeline.plans.plan_prompts import plan_prompts
from pipeline.plans.rehearse_forks import PLIES_A_YEAR, Rehearsal, codec_of, rehearse, some_positions
from pipeline.run_cards import run_cards
from pipeline.run_settings import CACHE_FOLDER, MODEL_FOLDER, RunSettings, check_objective, check_prompts, check_settings
from pipeline.search_teacher import DECISION_S
from pipeline.shared_cache import find_shared_cache
from pipeline.threads import plan_threads, usable_cores
from rollouts.fork import Tokens
from rollouts.settings import RolloutSettings
from state_cache.settings import CacheSettings
from state_cache.store import open_cache, version_name
from storage.adapters import published_versions
from storage.files import FILES
from storage.ledger_copies import check_ledgers
from storage.run_roots import as_given
from telemetry.cards import CardPlan
from telemetry.errors import InputError
from training.loss_name import try_loss
from training.settings import TinyModelSettings

Forecast = dict[str, Any]
_GENERATORS_BYTES = 10_000
"""Approximate size of the states of torch's and numpy's random generators in a checkpoint."""
_ADAPTER_FILES_BYTES = 12_000
"""Approximate size of an adapter's config, manifest and weight file header."""


def plan_train(settings: RunSettings, *, resume: bool = False) -> Forecast:
    """The plan of a training run; with `resume`, of the remaining steps of an existing run.

    Raises:
        InputError: the run itself would raise it: wrong settings, a name that is taken, no such model, too little memory.
    """
    check_settings(settings)
    check_objective(settings)
    if not resume:
        check_prompts(settings)
    try_loss(settings.training.loss)
    FILES.check(settings.runs_root)
    if resume:
        check_ledgers(settings.paths, settings.storage)
    done = max(published_versions(settings.paths), default=0) if resume else 0
    if not resume and settings.run and settings.paths.settings.exists():
        raise InputError(
            f"run '{settings.run}' exists already in {settings.runs_root}: go on with it by --resume, "
            "or choose another name with --run"
        )
    cards = run_cards(settings)
    model, shape = run_model(settings)
    machine = this_machine(cards)
    trainer, trainer_gpu = trainer_bytes(settings, shape), trainer_gpu_bytes(settings, shape, machine)
    check_memory(shape, settings.inference, trainer=trainer, trainer_gpu=trainer_gpu, machine=machine)
    cache, positions = _positions(settings)
    tokens = Tokens(codec_of(model), settings.prompts)
    if model is not None:  # without its tokenizer, bytes count as tokens
        tokens.check_thought(settings.inference.max_model_length)
    rollouts = settings.rollouts.at(settings.steps)  # the last horizon of a schedule, as if it were that of all steps
    rehearsal = rehearse(positions, tokens, rollouts, settings.inference.max_model_length, settings.seed)
    settings = settings.model_copy(update={"rollouts": rollouts, "steps": max(0, settings.steps - done)})
    name = settings.run or f"{Path(settings.inference.model).name.lower()}-seed{settings.seed}-<time>"
    folder = settings.runs_root / name
    work = _work(settings, rehearsal)
    return {
        "command": "train",
        "run": {"name": name, "folder": as_given(folder), "seed": settings.seed} | ({"steps_done": done} if resume else {}),
        "work": work,
        "prompts": plan_prompts(tokens, is_known=model is not None or settings.inference.model == TINY),
        "tokens": _tokens(settings, rehearsal, work["decisions_about"], exact=model is not None),
        "evaluation": evaluation_forecast(settings.evaluation, times=2, scripted=2),
        "disk": _disk(settings, rehearsal, shape, folder),
        "memory": memory_forecast(
            shape,
            settings.inference,
            machine,
            trainer_bytes_about(settings, shape, machine),
            trainer_gpu,
        ),
        "threads": _threads(settings),
        "adapter": adapter_forecast(settings.training, shape),
        "engine": engine_forecast(settings.inference, cards),
        "reused_or_made": {"state_cache": cache_line(cache, settings), "model": model_line(model, settings)},
        "figures": _figures(settings, folder),
        "prefect": prefect_forecast(),
    }


def plan_serve(model: str, settings: InferenceSettings, address: str, adapters_root: Path, has_key: bool) -> Forecast:
    """The plan of a worker at `address`.

    Raises:
        InputError: no such model, or too little memory.
    """
    folder = model_for_plan(model)
    shape = None if folder is None else read_shape(folder)
    cards = CardPlan(engine=engine_cards(settings))
    machine = this_machine(cards)
    check_length(settings, shape, model)
    check_memory(shape, settings, machine=machine)
    threads, _ = plan_threads(cores=usable_cores(), engine=settings.threads, trainer=0, overlap=False)
    return {
        "command": "serve",
        "worker": {
            "address": f"http://{address}",
            "key": f"from {KEY_VARIABLE}" if has_key else "none: loopback only",
            "adapters_from": str(adapters_root),
        },
        "memory": memory_forecast(shape, settings, machine, 0, flow=False),
        "threads": {"cores": usable_cores(), "engine": threads},
        "engine": engine_forecast(settings, cards),
        "reused_or_made": {"model": str(folder) if folder else f"'{model}', to be downloaded from the hub, which has it"},
    }


def plan_cache(settings: CacheSettings, runs_root: Path) -> Forecast:
    """The plan of building a state cache. An existing cache is read and verified.

    Raises:
        DataError: the existing cache is damaged.
    """
    found = find_shared_cache(runs_root, settings)
    if found is not None:
        open_cache(found)
        sizes = sum(file.stat().st_size for file in found.iterdir())
    else:
        some = some_positions(settings)
        row_bytes = sum(len(each.position) + len(each.source) + len(each.game_id) + 100 for each in some) / len(some)
        sizes = int(row_bytes * (settings.train_snapshots + settings.held_out_snapshots))
    return {
        "command": "cache build",
        "cache": {
            "folder": as_given(runs_root / CACHE_FOLDER / version_name(settings)),
            "train_positions": settings.train_snapshots,
            "held_out_positions": settings.held_out_snapshots,
            "years": f"{settings.first_year} to {settings.last_year}",
            "phases": ", ".join(settings.phases),
        },
        "disk": {"cache_bytes": sizes, "free_bytes": free_bytes(runs_root)},
        "reused_or_made": {"state_cache": "found: nothing to do" if found else "to be built"},
        "prefect": prefect_forecast(),
    }


def plan_model(recipe: TinyModelSettings, runs_root: Path, prompts: PromptSettings = DEFAULT_PROMPTS) -> Forecast:
    """The plan of making a tiny model.

    Raises:
        InputError: there is no such teacher.
    """
    player(recipe.teacher)
    found, shape = find_tiny(runs_root / MODEL_FOLDER, recipe, prompts), tiny_shape(recipe, prompts)
    return {
        "command": "model make",
        "model": {
            "folder": as_given(found) if found else as_given(runs_root / MODEL_FOLDER / "tiny-<recipe>"),
            "parameters": shape.parameters,
            "longest_sequence": shape.positions,
        },
        "work": {
            "scripted_games": recipe.source_games,
            "imitation_steps": recipe.imitation_steps,
            "positions_a_step": recipe.imitation_positions,
        },
        "disk": {"weights_bytes": shape.parameters * shape.width, "free_bytes": free_bytes(runs_root)},
        "threads": {"cores": usable_cores()},
        "reused_or_made": {"model": "found: nothing to do" if found else "to be made"},
    }


def run_model(settings: RunSettings) -> tuple[Path | None, ModelShape | None]:
    """(folder of the model, None if it is not here yet; its shape, None if unknown)."""
    name = settings.inference.model
    found = (
        find_tiny(settings.runs_root / MODEL_FOLDER, settings.tiny_model, settings.prompts)
        if name == TINY
        else model_for_plan(name)
    )
    shape = model_shape(name, settings.tiny_model, settings.prompts)
    check_length(settings.inference, shape, settings.inference.model)
    return found, shape


def _positions(settings: RunSettings) -> tuple[Path | None, Sequence[Snapshot]]:
    found = find_shared_cache(settings.runs_root, settings.cache)
    return found, some_positions(settings.cache) if found is None else open_cache(found).train


def _work(settings: RunSettings, rehearsal: Rehearsal) -> Forecast:
    rollouts, powers = settings.rollouts, 1 if settings.rollouts.policy_powers == "one" else 7
    forks = settings.steps * rollouts.start_groups * rollouts.forks_per_group
    plies = PLIES_A_YEAR * rollouts.horizon_years
    return {
        "steps": settings.steps,
        "start_groups_a_step": rollouts.start_groups,
        "forks_a_group": rollouts.forks_per_group,
        "policy_powers": powers,
        "plies_at_most": plies,
        "forks": forks,
        "decisions_at_most": forks * powers * plies,
        "decisions_about": round(forks * rehearsal.decisions_per_fork),
        **_searches(rollouts, forks * rehearsal.decisions_per_fork),
    }


def _searches(rollouts: RolloutSettings, decisions: float) -> Forecast:
    """What opponents that search cost, about, if the policy plays one power; nothing without them."""
    weights = {name: weight for name, weight in rollouts.opponent_table if name in rollouts.searching_opponents}
    if not weights or rollouts.policy_powers != "one":
        return {}
    share = sum(weights.values()) / sum(weight for _, weight in rollouts.opponent_table)
    return {"opponents_search_cpu_s_at_most_about": round(decisions * (len(POWERS) - 1) * share * DECISION_S)}


def _tokens(settings: RunSettings, rehearsal: Rehearsal, decisions: int, *, exact: bool) -> Forecast:
    longest = settings.inference.max_model_length
    plan: Forecast = {
        "request_at_most": longest,
        "prompt_about": round(rehearsal.prompt_tokens),
        "completion_about": round(rehearsal.completion_tokens),
        **({"thought_at_most": settings.prompts.thinking_tokens} if settings.prompts.thinking_tokens else {}),
        "prompts_of_the_run_about": round(rehearsal.prompt_tokens * decisions),
        "completions_of_the_run_about": round(rehearsal.completion_tokens * decisions),
        "basis": "some forks with uniform draws, with this model's tokenizer"
        if exact
        else "some forks with uniform draws; without a tokenizer each byte counts as a token, so these are upper bounds",
    }
    if exact and rehearsal.longest_request > longest:
        plan["warning"] = (
            f"a request may need {rehearsal.longest_request} tokens, more than inference.max_model_length {longest}: "
            "its fork would fail; raise it"
        )
    return plan


def evaluation_forecast(evaluation: EvaluationSettings, *, times: int, scripted: int) -> Forecast:
    forks = evaluation.positions * evaluation.powers_per_position
    return {
        "positions": evaluation.positions,
        "powers_a_position": evaluation.powers_per_position,
        "opponents": ", ".join(evaluation.opponents),
        "forks_of_the_policy": times * forks * len(evaluation.opponents),
        "decisions_at_most": times * forks * len(evaluation.opponents) * PLIES_A_YEAR * evaluation.horizon_years,
        "forks_of_scripted_players": scripted * forks,
    }


def _disk(settings: RunSettings, rehearsal: Rehearsal, shape: ModelShape | None, folder: Path) -> Forecast:
    rollouts, steps = settings.rollouts, settings.steps
    forks = steps * rollouts.start_groups * rollouts.forks_per_group
    tasks = -(-rollouts.start_groups // settings.pipeline.groups_per_task) if settings.pipeline.groups_per_task else 1
    decisions = round(forks * rehearsal.decisions_per_fork * rehearsal.decision_bytes)
    plies = round(forks * rehearsal.plies_per_fork * rehearsal.ply_bytes)
    plan: Forecast = {
        "decision_bytes": round(rehearsal.decision_bytes),
        "ply_bytes": round(rehearsal.ply_bytes),
        "shards_bytes_about": decisions + plies + steps * tasks * rehearsal.file_bytes,
    }
    total = plan["shards_bytes_about"]
    if shape is not None:
        training = settings.training
        adapter = 4 * shape.lora_parameters(training.lora_rank, training.lora_targets) + _ADAPTER_FILES_BYTES
        checkpoint = 3 * adapter + _GENERATORS_BYTES
        kept = min(steps, settings.training.keep_checkpoints)
        plan |= {
            "adapter_bytes": adapter,
            "adapters_bytes_about": steps * adapter,
            "checkpoint_bytes": checkpoint,
            "checkpoints_bytes_about": kept * checkpoint,
        }
        total += steps * adapter + kept * checkpoint
    else:
        plan["adapters"] = "unknown: the model is not here yet"
    free = free_bytes(folder)
    plan |= {"run_bytes_about": total, "free_bytes": free}
    if total > free:
        plan["warning"] = "the run may not fit the disk"
    return plan


def _threads(settings: RunSettings) -> Forecast:
    engine, trainer = settings.threads
    return {"cores": usable_cores(), "engine": engine, "trainer": trainer}


def engine_forecast(settings: InferenceSettings, cards: CardPlan) -> Forecast:
    trainer = {"trainer_cards": ", ".join(card.text for card in cards.trainer)} if cards.trainer else {}
    if settings.urls:
        return {"kind": "workers", "urls": ", ".join(settings.urls), "model": settings.model} | trainer
    build, unused = vllm_build(), unused_card()
    kind, reason = engine_kind(settings.engine, has_vllm=build is not None, has_cuda=build == "cuda" and has_cuda())
    text = reason if kind == "torch" else f"{reason}; it is built for {str(build).upper()}"
    plan: Forecast = {"kind": text, "model": settings.model, "dtype": settings.dtype}
    if kind != "torch":
        plan["block_tokens"] = settings.block_size
    if cards.engine:
        plan |= {"cards": ", ".join(card.text for card in cards.engine), "start_within_s": start_limit_s(settings)}
    if cards.shared:
        plan["one_after_the_other"] = "the trainer loads first, because both take the same card"
    return plan | trainer | ({"warning": unused} if unused else {})


def cache_line(found: Path | None, settings: RunSettings) -> str:
    wanted = f"{settings.cache.train_snapshots} positions and {settings.cache.held_out_snapshots} held out"
    return f"found: {found}" if found else f"to be built: {wanted}"


def model_line(found: Path | None, settings: RunSettings) -> str:
    if found is not None:
        return f"found: {found}"
    return "to be made from its recipe" if settings.inference.model == TINY else "to be downloaded from the hub, which has it"


def _figures(settings: RunSettings, folder: Path) -> Forecast:
    wandb = {
        "offline": f"offline, under {folder}",
        "online": f"online, project {settings.telemetry.wandb_project}",
        "disabled": "off",
    }
    return {
        "metrics": str(folder / "metrics.jsonl"),
        "summary": str(folder / "summary.json"),
        "wandb": wandb[settings.telemetry.wandb],
    }


def prefect_forecast() -> Forecast:
    url = os.environ.get("PREFECT_API_URL")
    return {
        "server": url or f"a temporary one for this command, with its database in {os.environ.get('PREFECT_HOME', '~/.prefect')}"
    }


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that `folder` will lie on."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
