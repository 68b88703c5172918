"""From the model and the figures of the stages to a file for `--config`, with a reason for each setting.

The engine gets the memory that the trainer does not need:

    share = (total - 1.1 * peak of a training step - 2 GiB) / total,    clamped to [0.2, 0.9]

The peak includes the trainer's weights; 2 GiB are for the two CUDA contexts, 10 % for fragmentation.
"""

import json
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from benchmarks.smoke.job import LONGEST, Device, Figures, Job
from entente.game.prompts import DEFAULT_PROMPTS
from entente.settings.find_model import model_shape
from entente.telemetry.errors import InputError
from entente.training.settings import TinyModelSettings

NEAR = 0.95
"""The smallest value with this share of the best rate is recommended, because it needs less memory."""
_GIB = 2**30


class Advice(NamedTuple):
    name: str
    """Section and setting, as in 'inference.dtype'."""
    value: str | int | float | bool
    reason: str


def model_advice(job: Job) -> list[Advice]:
    """The model that the stages tried, since a preset names another, and the sequence length with which they did."""
    longest = LONGEST[job.device]
    try:
        shape = model_shape(job.model, TinyModelSettings(), DEFAULT_PROMPTS)
    except InputError:  # the stages say it
        shape = None
    return [
        Advice("inference.model", job.model, "the other settings depend on its size"),
        Advice("inference.max_model_length", min(longest, shape.positions if shape else longest), "the length of every stage"),
    ]


def recommend(device: Device, figures: Mapping[str, Figures]) -> list[Advice]:
    """Settings for this device. `figures`: by stage, of the stages that passed; the others yield no settings."""
    none: Figures = {}
    card, engine, attention, step = (figures.get(name, none) for name in ("card", "engine", "attention", "training-step"))
    advice = []
    if device == "cuda":
        advice += [Advice(f"{section}.dtype", "bfloat16", "the dtype of every stage") for section in ("inference", "training")]
        if share := engine_share(card, step):
            taken = f"the trainer takes {peak_gib(step):.0f} of {card['total_bytes'] / _GIB:.0f} GiB"
            advice.append(Advice("inference.gpu_memory_utilization", share, taken if step else "the trainer's memory is unknown"))
    if rates := _numbered(engine, "decisions_per_s."):
        most = smallest_near_best(rates)
        reason = f"{rates[most]:.0f} decisions/s, of at most {max(rates.values()):.0f}"
        advice.append(Advice("inference.max_sequences", most, reason))
    if takes_flex(attention):
        reason = f"a step takes {attention['flex_s']:.2f} s, with ranges {attention['ranges_s']:.2f} s"
        advice.append(Advice("training.attention", "flex", reason))
    if step.get("recompute"):
        advice.append(Advice("training.gradient_checkpointing", True, "without it no step fitted into memory"))
    if budgets := _numbered(step, "tokens_per_s."):
        budget = smallest_near_best(budgets)
        reason = f"{budgets[budget]:,.0f} unique tokens/s, of at most {max(budgets.values()):,.0f}"
        advice.append(Advice("training.token_budget", budget, reason))
    return advice


def takes_flex(attention: Figures) -> bool:
    """Whether flex_attention has the gradient of the ranges, and is faster by more than two measurements differ."""
    return attention.get("agrees", 0.0) == 1.0 and attention["flex_s"] < NEAR * attention["ranges_s"]


def base_preset(names: Collection[str], card: Figures, device: Device) -> str:
    """The preset for the settings: 'gpu-N' with the largest N (GB) up to the card's memory; 'laptop' on a CPU."""
    sizes = {int(name[4:]): name for name in names if name.startswith("gpu-") and name[4:].isdigit()}
    fitting = [size for size in sizes if size * 1e9 <= card.get("total_bytes", 0.0)]
    return "laptop" if device == "cpu" else sizes[max(fitting or [min(sizes)])]


def engine_share(card: Figures, step: Figures) -> float:
    """The engine's share of the card, a multiple of 0.01; 0 if the card is unknown."""
    total = card.get("total_bytes", 0.0)
    if not total:
        return 0.0
    left = total - 1.1 * peak_gib(step) * _GIB - 2 * _GIB
    return min(0.9, max(0.2, math.floor(100 * left / total) / 100))


def peak_gib(step: Figures) -> float:
    """Peak memory of a step with the recommended token budget; 0 without measurements."""
    budgets = _numbered(step, "tokens_per_s.")
    return step.get(f"peak_gib.{smallest_near_best(budgets)}", 0.0) if budgets else 0.0


def smallest_near_best(rates: Mapping[int, float]) -> int:
    return min(key for key, rate in rates.items() if rate >= NEAR * max(rates.values()))


def as_toml(advice: Collection[Advice], remark: str) -> str:
    lines = [f"# {remark}"]
    for section in ("inference", "training"):
        own = [each for each in advice if each.name.startswith(f"{section}.")]
        lines += ["", f"[{section}]"] if own else []
        lines += [f"{each.name.partition('.')[2]} = {json.dumps(each.value)} # {each.reason}" for each in own]
    return "\n".join([*lines, ""])


def _numbered(figures: Figures, before: str) -> dict[int, float]:
    return {int(key.removeprefix(before)): value for key, value in figures.items() if key.startswith(before)}
