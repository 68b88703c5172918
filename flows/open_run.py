"""Open everything a run works with, in the order that matters, and close it whatever happens.

The trainer's process starts before vLLM is imported, and loads its model while the engine starts. Nothing of the run's folder is
written before the settings are known to be usable.
"""

import asyncio
import hashlib
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from decoding.codec import Codec
from decoding.model_files import max_position, model_fingerprint, resolve_model
from flows.build_state_cache import build_state_cache
from flows.run_settings import CACHE_FOLDER, MODEL_FOLDER, RunSettings, check_settings
from flows.thread_plan import apply_threads
from inference.embedded import EmbeddedEngine
from inference.engine import Engine
from inference.host import EngineHost
from inference.remote import RemoteEngine
from inference.settings import InferenceSettings
from rollouts.fork import Tokens
from state_cache.store import StateCache, find_cache, open_cache
from storage.runs import durable_write
from tasks.preparation import make_model
from tasks.resources import Resources
from telemetry.errors import InputError
from telemetry.progress import reporter
from training.process import TrainerProcess


def named(settings: RunSettings) -> RunSettings:
    """`settings` with a name for the run: the given one, or model, seed and time."""
    if settings.run:
        return settings
    model = Path(settings.inference.model).name.lower()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return settings.model_copy(update={"run": f"{model}-seed{settings.seed}-{stamp}"})


def check_inputs(settings: RunSettings) -> None:
    """Refuse what can be refused at once, before a server starts or a game is played.

    Raises:
        InputError: settings contradict each other, the run's name is taken, or there is no such model.
    """
    check_settings(settings)
    if settings.run and settings.paths.root.exists():
        raise InputError(f"run '{settings.run}' exists already in {settings.runs_root}: choose another name with --run")
    if settings.inference.model != "tiny":
        resolve_model(settings.inference.model)


async def prepare_model(settings: RunSettings) -> Path:
    """Folder of the model that plays: made on the spot, or resolved and checked.

    Raises:
        InputError: there is no such model, or it is too short for the settings.
    """
    if settings.inference.model == "tiny":
        folder = await make_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model)
    else:
        folder = await asyncio.to_thread(resolve_model, settings.inference.model)
    if settings.inference.max_model_length > max_position(folder):
        raise InputError(
            f"inference.max_model_length {settings.inference.max_model_length} exceeds the {max_position(folder)} positions "
            f"of model '{settings.inference.model}': lower it"
        )
    return folder.resolve()


async def prepare_cache(settings: RunSettings) -> StateCache:
    """The state cache of these settings, built by its own flow if it is not there yet."""
    root = settings.runs_root / CACHE_FOLDER
    path = find_cache(root, settings.cache) or await build_state_cache(settings.cache, settings.runs_root)
    return await asyncio.to_thread(open_cache, path)


def make_engine(settings: InferenceSettings, model: Path) -> Engine:
    """The engine that the settings mean: workers by URL, or vLLM in this process."""
    if settings.urls:
        return RemoteEngine(settings, os.environ.get(settings.key_variable), model_fingerprint(model))
    return EmbeddedEngine(model, settings)


@asynccontextmanager
async def open_run(settings: RunSettings) -> AsyncIterator[Resources]:
    """A fresh run's resources, ready to play and train.

    Raises:
        InputError: the settings contradict each other, or the run's name is taken.
    """
    check_inputs(settings)
    engine_threads, trainer_threads = settings.threads
    apply_threads(engine_threads)
    cache = await prepare_cache(settings)
    model = await prepare_model(settings)
    paths = settings.paths.create()
    durable_write(paths.settings, settings.model_dump_json(indent=1).encode())
    training = settings.training.model_copy(update={"seed": settings.seed})
    trainer = TrainerProcess(paths, model, training, settings.storage, trainer_threads)
    host = EngineHost()
    engine = make_engine(settings.inference, model)
    try:
        reporter().say("starting the engine and the trainer")
        await asyncio.wait_for(host.run(engine.start()), settings.inference.start_timeout_s)
        await asyncio.to_thread(trainer.ready)
    except InputError:
        # Nothing was played: the name stays free for the next try.
        await _close(engine, host, trainer)
        shutil.rmtree(paths.root)
        raise
    except BaseException:
        await _close(engine, host, trainer)
        raise
    try:
        yield Resources(
            paths=paths,
            model=model,
            seed=settings.seed,
            rollouts=settings.rollouts,
            cache=cache,
            host=host,
            engine=engine,
            tokens=Tokens(Codec(model)),
            trainer=trainer,
            provenance=_provenance(settings, model),
        )
    finally:
        await _close(engine, host, trainer)


async def _close(engine: Engine, host: EngineHost, trainer: TrainerProcess) -> None:
    await host.run(engine.close())
    host.close()
    await asyncio.to_thread(trainer.close)


def _provenance(settings: RunSettings, model: Path) -> dict[str, str]:
    return {
        "run": settings.run,
        "base_model": model_fingerprint(model),
        "tokenizer": hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()[:16],
        "settings": hashlib.sha256(json.dumps(settings.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()[:16],
    }
