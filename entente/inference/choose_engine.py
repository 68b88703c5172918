"""Chooses the engine of this process: vLLM on a GPU, torch everywhere else, unless a setting names one.

On a CPU vLLM's LoRA slots are slow. An engine's library is imported only after the choice, and CUDA is not called here: a process
that initialised CUDA cannot be assigned other GPUs, and vLLM could not fork from it.
"""

import os
from pathlib import Path
from typing import Literal

from entente.inference.engine import Engine
from entente.inference.engine_cards import engine_family, unused_card, vllm_build
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.inference.supervisor import EngineSupervisor
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter

_PLACES = {"vllm": "vLLM samples in a server that this process starts", "torch": "torch samples in this process"}


def engine_here(settings: InferenceSettings) -> tuple[Literal["vllm", "torch"], str]:
    """The engine on this machine, and the reason; raises InputError if the settings name vLLM and it is not installed."""
    kind, build = engine_family(settings), vllm_build()
    if kind == "vllm" and build is None:
        raise InputError(
            "inference.engine is 'vllm' but no vLLM is installed: install it (`make setup-vllm` on a CPU, the extra `gpu` "
            "on a card), or set inference.engine to 'auto', which then selects the torch engine"
        )
    if settings.engine != "auto":
        why = "inference.engine says so"
    elif kind == "vllm":
        why = "this machine has a GPU"
    else:
        why = "no vLLM is installed" if build is None else "vLLM is worth its start on a GPU only"
    return kind, f"{_PLACES[kind]}, because {why}"


def choose_engine(settings: InferenceSettings, model: Path, *, name: str = "", log: Path | None = None) -> Engine:
    """The engine for the model in the folder `model`, not started, without a supervisor; `log`: log file of vLLM's server.
    Raises InputError if the settings name vLLM and vLLM is not installed."""
    kind, _ = engine_here(settings)
    if kind == "vllm":
        from entente.inference.served_vllm import ServedVllm

        return ServedVllm(model, settings, name=name or "vllm", log=log)
    from entente.inference.torch_engine import TorchEngine

    return TorchEngine(model, settings, name=name or "torch")


def make_engine(settings: InferenceSettings, model: Path, *, log: Path | None = None) -> Engine:
    """The engine of a run, not started: a client of `settings.urls`, or an engine here. vLLM's server (output in `log`) is
    supervised, because it may crash alone; the torch engine has no process of its own."""
    if settings.urls:
        from entente.inference.vllm_client import VllmClient

        return VllmClient(settings.urls, settings, model, os.environ.get(KEY_VARIABLE))
    kind, why = engine_here(settings)
    reporter().say(why)
    if unused := unused_card():
        reporter().say(unused)
    if kind == "vllm":
        return EngineSupervisor(lambda: choose_engine(settings, model, log=log))
    return choose_engine(settings, model)
