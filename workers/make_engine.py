"""The engine that settings mean, for whoever plays: workers by URL, or one in this process that outlives its own death."""

import os
from pathlib import Path
from typing import Literal

from decoding.model_files import model_fingerprint
from inference.choose_engine import EngineKind, choose_engine, engine_here
from inference.engine import Engine
from inference.settings import AdapterMode, InferenceSettings
from telemetry.errors import InputError
from telemetry.progress import reporter
from workers.pool import RemoteEngine
from workers.supervisor import EngineSupervisor


def make_engine(settings: InferenceSettings, model: Path, *, scraped_into: Path | None = None) -> Engine:
    """The engine that the settings mean: workers by URL, or one in this process, which is built again if it fails.

    Args:
        scraped_into: file that keeps what workers' Prometheus pages say.
    """
    if settings.urls:
        key = os.environ.get(settings.key_variable)
        return RemoteEngine(settings, key, model_fingerprint(model), scraped_into=scraped_into)
    reporter().say(engine_here(settings)[1])
    return EngineSupervisor(lambda: choose_engine(settings, model, series=False))


def serving(kind: EngineKind | None, adapters: AdapterMode, versions: int) -> Literal["one", "each"]:
    """Whether one engine serves all these versions, or each needs its own.

    Args:
        kind: the engine of this machine; None: workers by URL.

    Raises:
        InputError: workers by URL that do not say that they have slots.
    """
    if versions < 2 or kind == "torch" or adapters == "slots":
        return "one"
    if kind is None:
        raise InputError(
            f"{versions} policy versions are to play and inference.adapters is '{adapters}', so workers by URL may hold one at a "
            "time: set it to 'slots' here and there, or leave inference.urls out"
        )
    return "one" if kind == "vllm_async" and adapters == "auto" else "each"
