"""Makes the engine that the settings name: a client of vLLM servers, or a supervised engine in this process."""

import os
from pathlib import Path

from inference.choose_engine import choose_engine, engine_here
from inference.engine import Engine
from inference.engine_cards import unused_card
from inference.settings import KEY_VARIABLE, InferenceSettings
from inference.supervisor import EngineSupervisor
from inference.vllm_client import VllmClient
from telemetry.progress import reporter


def make_engine(settings: InferenceSettings, model: Path, *, log: Path | None = None) -> Engine:
    """The engine for `settings`, not started yet: a client of `settings.urls`, or a supervised engine in this process.

    Args:
        model: folder of the base model.
        log: file of the log of a vLLM server that is started here; None: a temporary one.
    """
    if settings.urls:
        return VllmClient(settings.urls, settings, model, os.environ.get(KEY_VARIABLE))
    reporter().say(engine_here(settings)[1])
    if unused := unused_card():
        reporter().say(unused)
    return EngineSupervisor(lambda: choose_engine(settings, model, log=log))
