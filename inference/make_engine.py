"""The engine that settings mean, for whoever plays: workers by URL, or one in this process that outlives its own death."""

import os
from pathlib import Path

from decoding.model_files import model_fingerprint
from inference.choose_engine import choose_engine, engine_here
from inference.engine import Engine
from inference.pool import RemoteEngine
from inference.settings import InferenceSettings
from inference.supervisor import EngineSupervisor
from telemetry.progress import reporter


def make_engine(settings: InferenceSettings, model: Path, *, scraped_into: Path | None = None) -> Engine:
    """The engine that the settings mean: workers by URL, or one in this process, which is built again if it fails.

    Args:
        scraped_into: file that keeps what workers' Prometheus pages say.
    """
    if settings.urls:
        key = os.environ.get(settings.key_variable)
        return RemoteEngine(settings, key, model_fingerprint(model), scraped_into=scraped_into)
    reporter().say(engine_here(settings)[1])
    return EngineSupervisor(lambda: choose_engine(settings, model), restarts=settings.engine_restarts)
