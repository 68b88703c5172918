"""Chooses the engine of this process: vLLM on a GPU, torch everywhere else, unless a setting names one.

On a CPU vLLM gains nothing over torch: its LoRA slots are slow there.

An engine's library is imported only after the engine was chosen. Nothing here calls CUDA: a process that has initialised it
cannot be given other cards, and vLLM could not fork from it.
"""

import importlib.util
import os
from pathlib import Path
from typing import Literal

from entente.inference.engine import Engine
from entente.inference.engine_cards import has_cuda, unused_card, vllm_build
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.inference.supervisor import EngineSupervisor
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter

EngineKind = Literal["vllm", "torch"]
_PLACES = {"vllm": "a server of vLLM draws, which this process starts", "torch": "torch draws in this process"}


def engine_kind(wanted: Literal["auto"] | EngineKind, *, has_vllm: bool, has_cuda: bool) -> tuple[EngineKind, str]:
    """The engine for `inference.engine = wanted`, and the reason as one sentence.

    Raises:
        InputError: `wanted` is 'vllm' and vLLM is not installed.
    """
    if wanted == "vllm" and not has_vllm:
        raise InputError(
            "inference.engine is 'vllm' but no vLLM is installed: install it (`make setup-vllm` on a CPU, the extra `gpu` "
            "on a card), or set inference.engine to 'auto', which then takes the torch engine"
        )
    if wanted != "auto":
        return wanted, f"{_PLACES[wanted]}, because inference.engine says so"
    if has_vllm and has_cuda:
        return "vllm", f"{_PLACES['vllm']}, because this machine has a GPU"
    why = "no vLLM is installed" if not has_vllm else "vLLM is worth its start on a GPU only"
    return "torch", f"{_PLACES['torch']}, because {why}"


def engine_here(settings: InferenceSettings) -> tuple[EngineKind, str]:
    """`engine_kind` for `settings` on this machine; raises the same."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    return engine_kind(settings.engine, has_vllm=has_vllm, has_cuda=vllm_build() == "cuda" and has_cuda())


def choose_engine(settings: InferenceSettings, model: Path, *, name: str = "", log: Path | None = None) -> Engine:
    """The engine for `settings` and the model in the folder `model`, not started yet.

    Args:
        log: file of the log of vLLM's server; None: a temporary one.

    Raises:
        InputError: the settings name vLLM and vLLM is not installed.
    """
    kind, _ = engine_here(settings)
    if kind == "vllm":
        from entente.inference.served_vllm import ServedVllm

        return ServedVllm(model, settings, name=name or "vllm", log=log)
    from entente.inference.torch_engine import TorchEngine

    return TorchEngine(model, settings, name=name or "torch")


def make_engine(settings: InferenceSettings, model: Path, *, log: Path | None = None) -> Engine:
    """The engine of a run, not started yet: a client of `settings.urls`, or a supervised engine in this process.

    Args:
        model: folder of the base model.
        log: file of the log of a vLLM server that is started here; None: a temporary one.
    """
    if settings.urls:
        from entente.inference.vllm_client import VllmClient

        return VllmClient(settings.urls, settings, model, os.environ.get(KEY_VARIABLE))
    reporter().say(engine_here(settings)[1])
    if unused := unused_card():
        reporter().say(unused)
    return EngineSupervisor(lambda: choose_engine(settings, model, log=log))
