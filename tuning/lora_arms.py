"""What LoRA slots cost, cause by cause: which arms are measured against which, and what their seconds say. Pure.

The causes are those that are known to make a served adapter slow: slots being there at all, the adapter itself, slots wider than
the adapter, more versions in flight than slots, an adapter that is read again at every step, a first use, no CUDA graphs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from inference.settings import InferenceSettings
from inference.vllm_arguments import SLOT_RANKS, slot_rank

VERSIONS = 4
"""Policy versions in flight at once where several are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Requests under one or several versions, on one engine."""

    name: str
    engine: str
    versions: tuple[int, ...] = (0,)
    """Versions that requests take in turn; 0: no adapter."""
    in_place: bool = False
    """Every request says that its adapter is to be loaded again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One thing that may cost, and the two arms that differ in nothing else."""

    name: str
    with_it: str
    without: str
    cure: str


ARMS = (
    Arm(name="no slots", engine="plain"),
    Arm(name="slots unused", engine="slots"),
    Arm(name="adapter", engine="slots", versions=(1,)),
    Arm(name="versions", engine="slots", versions=tuple(range(1, VERSIONS + 1))),
    Arm(name="in place", engine="slots", versions=(1,), in_place=True),
    Arm(name="wide slots", engine="wide", versions=(1,)),
    Arm(name="few slots", engine="few", versions=tuple(range(1, VERSIONS + 1))),
    Arm(name="graphs", engine="graphs", versions=(1,)),
)
CAUSES = (
    Cause(
        name="slots, though no request uses one",
        with_it="slots unused",
        without="no slots",
        cure="inference.adapters 'merge_reload', where weights are float32",
    ),
    Cause(
        name="the adapter itself",
        with_it="adapter",
        without="slots unused",
        cure="fewer modules or a lower training.lora_rank; on a CPU inference.adapters 'merge_reload'",
    ),
    Cause(name="both of these", with_it="adapter", without="no slots", cure="as above"),
    Cause(
        name="slots wider than the adapter",
        with_it="wide slots",
        without="adapter",
        cure="inference.adapter_rank: the smallest that takes the adapter",
    ),
    Cause(
        name=f"{VERSIONS} versions in flight instead of one",
        with_it="versions",
        without="adapter",
        cure="whole start groups under one version; a lower storage.max_policy_lag",
    ),
    Cause(
        name="fewer slots than versions in flight",
        with_it="few slots",
        without="versions",
        cure="inference.adapter_slots: storage.max_policy_lag and two more",
    ),
    Cause(
        name="adapter loaded again in place",
        with_it="in place",
        without="adapter",
        cure="a new name and path for each version, as Entente's engines give it",
    ),
    Cause(
        name="eager, without CUDA graphs",
        with_it="adapter",
        without="graphs",
        cure="inference.enforce_eager 'off', and a kept inference.compile_cache",
    ),
)


def engines(base: InferenceSettings, adapter_rank: int, *, on_gpu: bool) -> dict[str, InferenceSettings]:
    """Settings of the engines that the arms need here; on a CPU there are no graphs to do without."""
    rank = slot_rank(adapter_rank)
    fit = {"adapters": "slots", "adapter_rank": rank, "adapter_slots": VERSIONS, "enforce_eager": "on", "urls": ()}
    wished = {
        "plain": fit | {"adapters": "merge_reload"},
        "slots": fit,
        "wide": fit | {"adapter_rank": wider(rank)},
        "few": fit | {"adapter_slots": VERSIONS // 2},
    }
    if on_gpu:
        wished["graphs"] = fit | {"enforce_eager": "off"}
    return {name: InferenceSettings.model_validate(base.model_dump() | values) for name, values in wished.items()}


def wider(rank: int) -> int:
    """A slot's rank two sizes up, or the largest."""
    return SLOT_RANKS[min(SLOT_RANKS.index(rank) + 2, len(SLOT_RANKS) - 1)]


def costs(seconds: Mapping[str, Sequence[float]], first: Mapping[str, float]) -> list[dict[str, object]]:
    """Each cause with its ratio, the median of the rounds' own; what was not measured says why.

    Args:
        seconds: of each arm's passes, round by round.
        first: of the first pass under an adapter, by arm.
    """
    found: list[dict[str, object]] = []
    for cause in CAUSES:
        told: dict[str, object] = {"cause": cause.name, "cure": cause.cure}
        with_it, without = seconds.get(cause.with_it, ()), seconds.get(cause.without, ())
        if with_it and without:
            ratios = [one / other for one, other in zip(with_it, without, strict=False)]
            told |= {"ratio": round(median(ratios), 3), "lowest": round(min(ratios), 3), "highest": round(max(ratios), 3)}
        else:
            told |= {"ratio": None, "why": "does not apply here: on a CPU vLLM runs eagerly, and there are no CUDA graphs"}
        found.append(told)
    if "adapter" in first and seconds.get("adapter"):
        ratio = round(first["adapter"] / median(seconds["adapter"]), 3)
        cure = "a warm-up of each version before it is served, as Entente's engines do"
        found.append(
            {"cause": "first use of an adapter (seen once)", "cure": cure, "ratio": ratio, "lowest": ratio, "highest": ratio}
        )
    why = "does not apply here: adapters are local folders that name their base, so no hub is asked"
    found.append(
        {"cause": "a hub asked at each load", "cure": "base_model_name_or_path, HF_HUB_OFFLINE=1", "ratio": None, "why": why}
    )
    return found
