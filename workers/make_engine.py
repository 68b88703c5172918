"""Makes the engine that the settings name: a pool of remote workers, or a supervised engine in this process."""

import os
from pathlib import Path
from typing import Literal

from decoding.model_files import model_fingerprint
from inference.choose_engine import EngineKind, choose_engine, engine_here
from inference.engine import Engine
from inference.engine_cards import unused_card
from inference.settings import KEY_VARIABLE, AdapterMode, InferenceSettings
from inference.supervisor import EngineSupervisor
from telemetry.errors import InputError
from telemetry.progress import reporter
from workers.pool import RemoteEngine


def make_engine(settings: InferenceSettings, model: Path, *, scraped_into: Path | None = None, log: Path | None = None) -> Engine:
    """The engine for `settings`, not started yet: a pool of `settings.urls`, or a supervised engine in this process.

    Args:
        model: folder of the base model.
        scraped_into: file for readings of the workers' Prometheus pages.
        log: file of the log of a server that is started here; None: a temporary one.
    """
    if settings.urls:
        key = os.environ.get(KEY_VARIABLE)
        return RemoteEngine(settings, key, model_fingerprint(model), scraped_into=scraped_into)
    reporter().say(engine_here(settings)[1])
    if unused := unused_card():
        reporter().say(unused)
    return EngineSupervisor(lambda: choose_engine(settings, model, log=log))


def serving(kind: EngineKind | None, adapters: AdapterMode, versions: int) -> Literal["one", "each"]:
    """Whether one engine can serve that many `versions` at a time, or each version needs its own engine.

    Args:
        kind: the engine of this machine; None: remote workers.

    Raises:
        InputError: remote workers may hold one version at a time.
    """
    if versions < 2 or kind is not None or adapters == "slots":
        return "one"
    raise InputError(
        f"{versions} policy versions are to play and inference.adapters is '{adapters}', so workers by URL may hold one at a "
        "time: set it to 'slots' here and there, or leave inference.urls out"
    )
