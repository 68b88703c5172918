"""Chooses the engine of this process: vLLM on a GPU, torch everywhere else, unless a setting names one.

On a CPU vLLM gains nothing over torch: its LoRA slots are slow there, and merged weights serve one version at a time.

An engine's library is imported only after the engine was chosen. Nothing here calls CUDA: a process that has initialised it
cannot be given other cards, and vLLM could not fork from it.
"""

import importlib.util
from pathlib import Path
from typing import Literal

from inference.engine import Engine
from inference.engine_cards import has_cuda, vllm_build
from inference.settings import InferenceSettings
from telemetry.errors import InputError

EngineKind = Literal["vllm", "vllm_async", "torch"]


def engine_kind(wanted: Literal["auto"] | EngineKind, *, has_vllm: bool, has_cuda: bool) -> tuple[EngineKind, str]:
    """The engine for `inference.engine = wanted`, and the reason as one sentence.

    Raises:
        InputError: `wanted` is a vLLM engine and vLLM is not installed.
    """
    if wanted in ("vllm", "vllm_async") and not has_vllm:
        raise InputError(
            f"inference.engine is '{wanted}' but no vLLM is installed: install it (`make setup-vllm` on a CPU, the extra `gpu` "
            "on a card), or set inference.engine to 'auto', which then takes the torch engine"
        )
    if wanted != "auto":
        return wanted, f"{wanted} draws in this process, because inference.engine says so"
    if has_vllm and has_cuda:
        return "vllm_async", "vllm draws on this machine's GPU, in a process of its own"
    why = "no vLLM is installed" if not has_vllm else "vLLM is worth its start on a GPU only"
    return "torch", f"torch draws in this process, because {why}"


def engine_here(settings: InferenceSettings) -> tuple[EngineKind, str]:
    """`engine_kind` for `settings` on this machine; raises the same."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    return engine_kind(settings.engine, has_vllm=has_vllm, has_cuda=vllm_build() == "cuda" and has_cuda())


def choose_engine(settings: InferenceSettings, model: Path, *, name: str = "", series: bool = True) -> Engine:
    """The engine for `settings` and the model in the folder `model`, not started yet.

    Args:
        series: keep vLLM's Prometheus series; only a worker shows them.

    Raises:
        InputError: the settings name a vLLM engine and vLLM is not installed.
    """
    kind, _ = engine_here(settings)
    if kind == "vllm_async":
        from inference.async_engine import AsyncEngine

        return AsyncEngine(model, settings, name=name or "async")
    if kind == "vllm":
        from inference.embedded import EmbeddedEngine

        return EmbeddedEngine(model, settings, name=name or "embedded", series=series)
    from inference.torch_engine import TorchEngine

    return TorchEngine(model, settings, name=name or "torch")
