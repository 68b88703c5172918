"""Chooses the engine of this process: vLLM on a GPU, torch everywhere else, unless a setting names one.

On a CPU vLLM's LoRA slots are slow. An engine's library is imported only after the choice, and CUDA is not called here: a process
that initialised CUDA cannot be assigned other GPUs, and vLLM could not fork from it.
"""

import os
from pathlib import Path
from typing import Literal

from entente.inference.engine import Engine
from entente.inference.engine_cards import check_vllm, engine_family, unused_card, vllm_build
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.inference.supervisor import EngineSupervisor
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter

_PLACES = {"vllm": "vLLM samples in a server that this process starts", "torch": "torch samples in this process"}


def engine_here(settings: InferenceSettings, why_named: str = "") -> tuple[Literal["vllm", "torch"], str]:
    """The engine on this machine, and the reason: `why_named` if the caller, not a user, named the engine in the settings.
    Raises InputError if it is vLLM, and its environment is missing or wrong."""
    kind = engine_family(settings)
    if kind == "vllm":
        try:
            check_vllm()
        except InputError as error:
            raise InputError(f"the engine is vLLM, but {error}; or set inference.engine to 'torch'") from error
    if settings.engine != "auto":
        why = why_named or f"inference.engine is '{kind}'"
    elif kind == "vllm":
        why = "this machine has a GPU"
    else:
        why = "no vLLM is installed" if vllm_build() is None else "vLLM is worth its start on a GPU only"
    return kind, f"{_PLACES[kind]}, because {why}"


def choose_engine(settings: InferenceSettings, model: Path, *, log: Path | None = None) -> Engine:
    """The engine for the model in the folder `model`, not started, without a supervisor; `log`: log file of vLLM's server.
    Raises InputError as `engine_here`."""
    kind, _ = engine_here(settings)
    if kind == "vllm":
        from entente.inference.served_vllm import ServedVllm

        return ServedVllm(model, settings, log=log)
    from entente.inference.torch_engine import TorchEngine

    return TorchEngine(model, settings)


def make_engine(settings: InferenceSettings, model: Path, *, log: Path | None = None, why_named: str = "") -> Engine:
    """The engine of a run, not started: a client of `settings.urls`, or an engine here. vLLM's server (output in `log`) is
    supervised, because it may crash alone; the torch engine has no process of its own. `why_named`: see `engine_here`."""
    if settings.urls:
        from entente.inference.vllm_client import VllmClient

        return VllmClient(settings.urls, settings, model, os.environ.get(KEY_VARIABLE))
    kind, why = engine_here(settings, why_named)
    reporter().say(why)
    if unused := unused_card(settings):
        reporter().say(unused)
    if kind == "vllm":
        return EngineSupervisor(lambda: choose_engine(settings, model, log=log))
    return choose_engine(settings, model)
