"""The device of this machine's engine, and the GPUs that it uses, from package metadata and NVML.

The module imports neither torch nor vLLM and creates no CUDA context, so vLLM may still be assigned its GPUs.
"""

from collections.abc import Sequence
from importlib import metadata
from typing import Literal

from entente.inference.settings import InferenceSettings
from entente.telemetry.cards import Card, check_visible, driver_problem, plan_cards, torch_cuda, visible_cards
from entente.telemetry.errors import InputError
from entente.telemetry.vllm_environment import COMPILER, VllmEnvironment, find_vllm, missing_to_compile, vllm_problem


def vllm_build() -> Literal["cpu", "cuda"] | None:
    """The device that the vLLM of its own environment is built for; None: there is none."""
    found = find_vllm()
    return found.build if found else None


def engine_family(settings: InferenceSettings) -> Literal["vllm", "torch"]:
    if settings.engine == "auto":
        vllm = find_vllm()
        on_card = vllm is not None and vllm.build == "cuda" and ("+rocm" in vllm.torch or bool(visible_cards()))
        return "vllm" if on_card else "torch"
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


def unused_card(settings: InferenceSettings) -> str:
    """A sentence if this machine has a GPU that the engine does not use, or for which it is not made; else empty."""
    names = ", ".join(dict.fromkeys(card.name for card in visible_cards()))
    build = None if settings.engine == "torch" else vllm_build()
    if not names or settings.urls or build == "cuda" or (settings.engine == "torch" and torch_cuda() is not None):
        return ""
    if build is None and torch_cuda() is not None:
        what = "no vLLM is installed, so the torch engine samples"
    else:
        what = f"the installed {'vLLM' if build else 'torch'} is built for the CPU, so it is unused"
    return f"this machine has a card ({names}), but {what}; `make setup` on a machine with a card installs both for CUDA"


def check_vllm() -> VllmEnvironment:
    """The environment of vLLM. Raises InputError if its server cannot start: wrong packages, or on a card an old driver or no
    compiler."""
    found = find_vllm()
    problem = vllm_problem(found)
    if found is not None and problem is None and found.build == "cuda" and (cards := visible_cards()):
        problem = driver_problem(cards[0].driver, found.cuda) if found.cuda else None
        if problem is None and (missing := missing_to_compile(found.header)):
            problem = f"vLLM compiles kernels at its start, and {missing}", COMPILER
    if found is None or problem is not None:
        sentence, cure = problem or ("", "")
        raise InputError(f"{sentence}: {cure}")
    return found
