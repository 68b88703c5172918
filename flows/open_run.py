"""Opens a run's resources in the required order, and closes them however the run ends.

The trainer process starts before vLLM is imported, and loads while the engine starts; on a shared card the engine waits for
it, because vLLM measures free memory. Settings are checked before the run's folder is written, so a refused run leaves its
name free. A resumed run continues from its files alone.
"""

import asyncio
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from prefect.runtime import flow_run

from entente.decoding.architectures import read_architecture
from entente.decoding.base_identity import FORM, identity_of
from entente.decoding.codec import Codec
from entente.decoding.model_files import max_position, read_config, resolve_model
from entente.decoding.weight_files import stored_format
from entente.inference.choose_engine import make_engine
from entente.inference.engine_cards import engine_dtype
from entente.inference.host import EngineHost, start_engine
from entente.inference.memory_plan import read_shape, trainer_share
from entente.players.policy import Tokens
from entente.records.policy_version import TrainedStep
from entente.reports.read_run import read_run
from entente.settings.cache_version import cache_sources
from entente.settings.check_settings import check_settings, try_loss
from entente.settings.find_model import check_length, check_room, token_budget
from entente.settings.layers import check_prompts, check_steps, check_what_is_there, rate_warning, settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.cards import CardPlan
from entente.telemetry.devices import GPU_BEAT_S, GpuSampler
from entente.telemetry.errors import DataError, InputError
from entente.telemetry.machine import apply_threads, environment
from entente.telemetry.progress import reporter
from entente.training.process import TrainerProcess
from flows.build_state_cache import build_state_cache, changed_source, usable_cache
from flows.given_parameters import started_by_deployment
from flows.work_record import read_work, record_work
from state_cache.store import StateCache, find_cache, open_cache
from storage.adapters import read_adapter
from storage.arrow_files import FINAL
from storage.control import ControlDesk, bot_sources, edited_since, part_sources, source_hash
from storage.files import durable_write, file_lock, folders_in, set_aside
from storage.json_files import kept_object, write_json
from storage.ledger import restore_ledgers
from storage.run_base import new_base, resumed_base
from storage.runs import CACHE_FOLDER, MODEL_FOLDER, RunPaths, check_runs_root
from tasks.dask_rollouts import check_scheduler, dask_cluster
from tasks.open_objects import OpenRun
from tasks.preparation import make_model
from tasks.rollout_queue import RolloutQueue, groups_per_task
from tasks.train_policy import quoted, roll_out_groups, roll_out_on_dask


def with_run_name(settings: RunSettings, stamp: str = "") -> RunSettings:
    """Name an unnamed run after model, seed and `stamp`; default: time and two random bytes. So runs that start in the same
    second differ, and the model's folder may have any name."""
    if settings.run:
        return settings
    model = re.sub(r"[^a-z0-9_.-]+", "-", Path(settings.inference.model).name.lower()).lstrip("-._")[:50] or "model"
    stamp = stamp or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return settings.model_copy(update={"run": f"{model}-seed{settings.seed}-{stamp}"})


def begun_run(settings: RunSettings, *, resume: bool) -> tuple[RunSettings, bool]:
    """Settings with the run's name, and whether to resume: Prefect's Retry continues the run that its flow run began.

    A deployment's flow run gives an unnamed run the name that recovery does, so it cannot train beside its replacement if it
    starts after it counted as lost.
    """
    work = read_work(settings.runs_root, flow_run.id) if flow_run.id is not None else None
    if work is not None:
        began = RunPaths(settings.runs_root / work.run)
        record_work(began, work.flow_run)  # else recovery looks for the process of the earlier start
        if began.settings.exists():
            return settings.model_copy(update={"run": work.run}), True
    stamp = flow_run.id[-8:] if flow_run.id is not None and started_by_deployment() else ""
    named = with_run_name(settings, stamp)
    return named, resume or (bool(stamp) and not settings.run and named.paths.settings.exists())


def check_inputs(settings: RunSettings, *, resume: bool = False) -> CardPlan:
    """Check inputs before a server starts or a game is played.

    Returns the run's cards. Raises InputError for contradictory settings (or against the resumed run), a taken name, no run to
    resume, a missing model, or an unusable tokenizer, chat template or card.
    """
    check_settings(settings)
    check_runs_root(settings.runs_root, settings.run)
    check_what_is_there(settings, resume=resume)
    if settings.pipeline.task_runner == "dask":
        check_scheduler(settings.pipeline.dask_address)
    if settings.inference.model != "tiny":
        tokens = Tokens(Codec(resolve_model(settings.inference.model)), settings.prompts)
        tokens.check_thought(settings.inference.max_model_length)
    if not resume:
        check_prompts(settings)  # of a model from the hub, once downloaded
    cards = check_room(settings, trains=True)
    apply_threads(settings.threads[0])  # a user's own loss imports torch
    try_loss(settings.training.loss)
    return cards


def finished_summary(settings: RunSettings) -> dict[str, Any] | None:
    """The summary of a run that is done with these steps and scored with these settings; None if work remains, also if its last
    version has to be published again."""
    paths = settings.paths
    summary = kept_object(paths.summary)
    same = summary.get("steps") == settings.steps and settings_of(paths).evaluation.question == settings.evaluation.question
    if same:
        try:
            read_adapter(paths, settings.steps)
        except DataError as error:
            reporter().say(str(error))
            return None
        reporter().say(f"run '{settings.run}' has done its {settings.steps} steps: raise --steps to continue it")
    return {**summary, "run": str(paths.root)} if same else None  # the run may have been moved since


async def prepare_model(settings: RunSettings) -> Path:
    """Folder of the base model; makes a missing tiny model. Raises InputError if there is none, or it is too short for the
    settings."""
    if settings.inference.model == "tiny":
        folder = await make_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model, settings.prompts)
    else:
        folder = await asyncio.to_thread(resolve_model, settings.inference.model)
    check_length(settings.inference, max_position(folder), settings.inference.model)
    return folder.resolve()


async def prepare_cache(settings: RunSettings, *, new: bool = False) -> StateCache:
    """The state cache of these settings. A subflow builds it if it is missing or damaged. Raises InputError if sources of the
    cache have changed, and it is damaged, or for a `new` run and others use it."""
    find = usable_cache if new else find_cache  # an existing run keeps its positions
    folder = await asyncio.to_thread(find, settings.runs_root / CACHE_FOLDER, settings.cache)
    if folder is not None:
        try:
            return await asyncio.to_thread(open_cache, folder, settings.cache)
        except DataError as error:
            source = RunPaths(settings.runs_root / settings.cache.from_run) if settings.cache.from_run else None
            if changed := changed_source(folder, cache_sources(settings.cache, source)):
                raise InputError(
                    f"{error} It would have other positions then, because the {changed} is another one now: restore the folder "
                    "from a copy"
                ) from error
            reporter().say(f"set aside and built again: {error}")
            set_aside(folder)
    built = await build_state_cache(settings.cache, settings.runs_root)
    assert built is not None, "no run was named"
    return await asyncio.to_thread(open_cache, built)


@asynccontextmanager
async def open_run(settings: RunSettings, *, resume: bool = False) -> AsyncIterator[OpenRun]:
    """Open the resources of a new run, or with `resume` of an existing one.

    Raises:
        InputError: contradictory settings, a taken or missing name, another process trains it, or it is past `settings.steps`.
    """
    cards = check_inputs(settings, resume=resume)
    engine_threads, trainer_threads = settings.threads
    fixed_threads = "OMP_NUM_THREADS" in os.environ  # the user's variables win
    apply_threads(engine_threads)
    paths = settings.paths
    async with AsyncExitStack() as stack:
        stack.enter_context(_cancelled_by_sigterm())
        cache = await prepare_cache(settings, new=not resume)
        positions = _positions(cache)
        if resume and kept_object(paths.environment).get("positions", positions) != positions:
            raise InputError(
                f"'{cache.path}' was built again with other positions than run '{settings.run}' began with: restore the folder "
                "from a copy, or go on with the release that began the run"
            )
        model = await prepare_model(settings)
        base = await asyncio.to_thread(resumed_base if resume else new_base, paths, model)
        if warning := rate_warning(settings.training.learning_rate, read_architecture(model).hidden):
            reporter().say(warning)
        tokens = Tokens(Codec(model), settings.prompts)
        tokens.check_thought(settings.inference.max_model_length)
        # Wait a second: a report takes this lock briefly to see whether the run is being trained.
        if not stack.enter_context(file_lock(paths.lock, wait_s=1.0)):
            raise InputError(f"run '{settings.run}' is being trained by another process: wait for it, or stop it")
        # Another process may have trained a run of this name while this one prepared.
        check_what_is_there(settings, resume=resume)
        paths.create()
        if flow_run.id is not None:
            record_work(paths, flow_run.id)
        if not resume:
            durable_write(paths.settings, settings.model_dump_json(indent=1).encode())
            stack.push(partial(_free_name, paths))
        for sentence in restore_ledgers(paths, settings.storage) if resume else ():
            reporter().say(sentence)
        budget = token_budget(settings, read_shape(model), cards)
        training = settings.training.model_copy(update={"seed": settings.seed, "token_budget": budget})
        share = trainer_share(cards, settings.inference)
        trainer = TrainerProcess(
            paths,
            model,
            training,
            settings.storage,
            trainer_threads,
            cards=cards.trainer,
            card_share=share,
            engine_dtype=engine_dtype(settings.inference, stored_format(model, read_config(model))),
        )
        stack.push_async_callback(asyncio.to_thread, trainer.close)
        host = EngineHost()
        stack.callback(host.close)
        engine = make_engine(settings.inference, model, log=paths.vllm_log)
        stack.push_async_callback(lambda: host.run(engine.close()))
        reporter().say("starting the trainer, then the engine" if cards.shared else "starting the engine and the trainer")
        if cards.shared:
            await asyncio.to_thread(trainer.ready)
        await start_engine(host, engine, settings.inference)
        resume_point = await asyncio.to_thread(trainer.ready)
        _check_resume_point(settings, resume_point)
        paths.summary.unlink(missing_ok=True)  # of fewer steps or other scores; a kill must not leave it beside these settings
        durable_write(paths.settings, settings.model_dump_json(indent=1).encode())
        sources = own_sources(settings)
        if edited := edited_since(sources):  # as between two runs of a sweep or a notebook
            reporter().say(
                f"{', '.join(edited)} was edited since this process loaded it: the trainer has the edited files, all else the "
                "former ones"
            )
        found = environment() | sources | edited | {"positions": positions}
        if changes := _changes(kept_object(paths.environment), found):
            reporter().say(f"since the run was last started, this has changed: {changes}")
        write_json(paths.environment, found)
        write_json(paths.base, base)
        provenance = _provenance(settings, model, identity_of({name: base[name] for name in base if name not in FORM}))
        control = ControlDesk(
            paths,
            base_model=provenance["base_model"],
            plays=settings.plays,
            max_policy_lag=settings.storage.max_policy_lag,
            opponents=settings.rollouts.scripted_opponents,
        )
        await asyncio.to_thread(control.serve, resume_point.published)
        resources = OpenRun(
            paths=paths,
            model=model,
            seed=settings.seed,
            rollouts=settings.rollouts,
            max_policy_lag=settings.storage.max_policy_lag,
            cache=cache,
            host=host,
            engine=engine,
            tokens=tokens,
            trainer=trainer,
            engine_threads=(engine_threads, engine_threads if fixed_threads else settings.threads_if(overlap=False)[0]),
            resume_point=resume_point,
            provenance=provenance,
            control=control,
            gpus=stack.enter_context(GpuSampler(GPU_BEAT_S, paths.devices, cards=(*cards.engine, *cards.trainer))),
            endpoint=settings.endpoint,
        )
        stack.push_async_callback(lambda: host.run(resources.endpoints.close()))
        yield resources


@asynccontextmanager
async def open_queue(settings: RunSettings, resources: OpenRun) -> AsyncIterator[RolloutQueue]:
    async with AsyncExitStack() as stack:
        play = partial(roll_out_groups, quoted(resources))
        if settings.pipeline.task_runner == "dask":
            cluster = await stack.enter_async_context(dask_cluster(settings))
            play = partial(roll_out_on_dask, quoted(resources), quoted(cluster))
        queue = RolloutQueue(
            resources,
            play,
            depth=settings.pipeline.buffer_depth,
            last_step=settings.steps,
            groups_per_task=groups_per_task(settings),
            step_done=resources.resume_point.step_done,
            logged=read_run(resources.paths).steps,
        )
        yield await stack.enter_async_context(queue)


def own_sources(settings: RunSettings) -> dict[str, str]:
    """Package -> hash of its source: this program, and the user's bots, rewards and loss of the settings."""
    parts = (*(name.removeprefix(FINAL) for name in settings.storage.reward_weights), settings.training.loss)
    return {"entente": source_hash("entente"), **bot_sources(settings.rollouts.scripted_opponents), **part_sources(parts)}


def _positions(cache: StateCache) -> str:
    """Hash of what a cache holds, 16 hex digits. With equal settings it may be another one if the folder was lost: the run whose
    positions it took in has fewer shards now, or a user's bot plays otherwise."""
    content = hashlib.sha256()
    for snapshot in (*cache.train, *cache.held_out):
        content.update(f"{snapshot.game_id} {snapshot.power} {snapshot.position}\n".encode())
    return content.hexdigest()[:16]


def _changes(before: Mapping[str, Any], now: Mapping[str, str]) -> str:
    """What both records of an environment name and give otherwise, in words; empty if there is nothing."""
    return ", ".join(f"{name} {now[name]} (was {before[name]})" for name in now if before.get(name, now[name]) != now[name])


def _free_name(paths: RunPaths, kind: object, error: BaseException | None, trace: object) -> None:
    """Exit callback: free the name of a run whose input was refused before any rollout or answer of an endpoint, by removing
    settings.json, and the scores, which are of this run's model and positions."""
    if isinstance(error, InputError) and not folders_in(paths.shards) and not paths.answers.exists():
        shutil.rmtree(paths.scores, ignore_errors=True)
        paths.settings.unlink()


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM cancels the current task, as Ctrl-C does, so that the flow closes engine and trainer.

    Main thread only, which receives signals. Prefect's own handler raises mostly inside the event loop, which then stops
    before the flow can close anything. A Prefect worker that cancels a flow run also sends SIGTERM; Prefect tells them apart.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a flow runs in a task"
    before = signal.getsignal(signal.SIGTERM)
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    except (RuntimeError, ValueError):  # not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


def _check_resume_point(settings: RunSettings, point: TrainedStep) -> None:
    for sentence in point.set_aside:
        reporter().say(f"set aside: {sentence}")
    check_steps(settings, point.step_done)
    if point.step_done:
        reporter().say(f"continuing after step {point.step_done}")


def _provenance(settings: RunSettings, model: Path, base: str) -> dict[str, str]:
    # Without the folders of run and model, which change when they are moved.
    hashed = settings.model_dump(mode="json", exclude={"runs_root": True, "inference": {"model"}})
    return {
        "run": settings.run,
        "base_model": base,
        "tokenizer": hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()[:16],
        "settings": hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16],
    }
