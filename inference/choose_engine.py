"""Which engine draws in this process, and why: one rule for runs, workers and whoever asks.

vLLM where it is installed, the torch engine elsewhere; a setting decides otherwise. Loads neither before it is chosen.
"""

import importlib.util
from pathlib import Path
from typing import Literal

from inference.engine import Engine
from inference.settings import InferenceSettings
from telemetry.errors import InputError

EngineKind = Literal["vllm", "vllm_async", "torch"]


def engine_kind(wanted: Literal["auto"] | EngineKind, *, has_vllm: bool, has_cuda: bool) -> tuple[EngineKind, str]:
    """The engine that the setting `wanted` means here, and one sentence that says why.

    Raises:
        InputError: vLLM is asked for and not installed.
    """
    if wanted in ("vllm", "vllm_async") and not has_vllm:
        raise InputError(
            f"inference.engine is '{wanted}' but no vLLM is installed: install the extra `cpu` or `gpu`, or set "
            "inference.engine to 'auto', which then takes the torch engine"
        )
    if wanted != "auto":
        return wanted, f"{wanted} draws in this process, because inference.engine says so"
    if has_vllm and has_cuda:
        return "vllm_async", "vllm draws on this machine's GPU, in a process of its own"
    if has_vllm:
        return "vllm", "vllm draws in this process, because it is installed"
    return "torch", "torch draws in this process, because no vLLM is installed"


def engine_here(settings: InferenceSettings) -> tuple[EngineKind, str]:
    """`engine_kind` for `settings` on this machine.

    Raises:
        InputError: vLLM is asked for and not installed.
    """
    return engine_kind(settings.engine, has_vllm=importlib.util.find_spec("vllm") is not None, has_cuda=_has_cuda())


def choose_engine(settings: InferenceSettings, model: Path, *, name: str = "", series: bool = True) -> Engine:
    """The engine for `settings` over the model in `model`, not started yet.

    Args:
        series: it keeps vLLM's Prometheus series, which a worker shows and nobody else reads.

    Raises:
        InputError: vLLM is asked for and not installed.
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


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
