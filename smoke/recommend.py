"""Derives settings from the figures of the stages: one file for `--config`, with a reason beside each setting. Pure functions.

The share of the card that the engine takes is what the trainer leaves:

    share = (total - 1.1 * peak of a training step - 2 GiB) / total,    from 0.2 to 0.9

The peak holds the trainer's weights; 2 GiB are the two CUDA contexts; a tenth is for fragments.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from smoke.job import Device, Figures

NEAR = 0.95
"""A value that reaches this share of the best rate is as good; the smallest such value is taken, because it needs less memory."""
GAIN = 1.03
"""A switch is set where it gains more than this; below, it is noise."""
_GIB = 2**30
_SECTIONS = ("inference", "training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One setting with its reason."""

    name: str
    """Section and setting, as in 'inference.dtype'."""
    value: str | int | float | bool
    reason: str


def recommend(device: Device, found: Mapping[str, Figures]) -> list[Advice]:
    """Settings for this device, as far as the stages of `found` tell: figures of the stages that passed, by stage."""
    none: Figures = {}
    card, engine, step = (found.get(name, none) for name in ("card", "engine", "training-step"))
    advice = []
    if device == "cuda":
        for name in ("inference.dtype", "training.dtype"):
            advice.append(Advice(name=name, value="bfloat16", reason="the number format of every measured stage"))
        if share := engine_share(card, step):
            taken = peak_gib(step)
            why = (
                f"the trainer takes {taken:.0f} of {card['total_bytes'] / _GIB:.0f} GiB" if taken else "nothing else was measured"
            )
            advice.append(Advice(name="inference.gpu_memory_share", value=share, reason=why))
    if rates := _numbered(engine, "decisions_per_s."):
        most = smallest_near_best(rates)
        advice.append(
            Advice(
                name="inference.max_sequences",
                value=most,
                reason=f"{rates[most]:.0f} decisions/s, of at most {max(rates.values()):.0f}",
            )
        )
    advice += _switches(device, found)
    return advice + _training(step)


def _switches(device: Device, found: Mapping[str, Figures]) -> list[Advice]:
    """Jump and adapters, from the stages that measured both ways."""
    advice, jump, ways = [], found.get("jump", {}), found.get("adapters", {})
    if "gain" in jump:
        on = jump["gain"] > GAIN
        reason = f"forced tokens in one pass draw {jump['gain']:.2f} times as many decisions a second"
        advice.append(Advice(name="inference.jump_forced", value="on" if on else "off", reason=reason))
    rates = {way: ways[f"{way}.decisions_per_s"] for way in ("slots", "merge_reload") if f"{way}.decisions_per_s" in ways}
    if rates:
        # Only slots serve several versions at once, and only they lose nothing to rounding in 16 bits.
        best = "merge_reload" if "slots" not in rates or rates.get("merge_reload", 0.0) > GAIN * rates["slots"] else "slots"
        if device == "cuda" and "slots" in rates:
            best = "slots"
        shown = ", ".join(f"{way} {rate:.0f}" for way, rate in rates.items())
        advice.append(Advice(name="inference.adapters", value=best, reason=f"decisions/s: {shown}"))
    return advice


def attention_remark(found: Mapping[str, Figures]) -> str:
    """Which packed attention is the fastest that agrees with padded rows; "" if none was measured. Training chooses by itself."""
    agree = {key.removeprefix("agrees.") for key in found.get("attention", {}) if key.startswith("agrees.")}
    times = {kind: seconds for kind, seconds in _step_times(found.get("training-step", {})).items() if kind in agree}
    if not times:
        return ""
    shown = ", ".join(f"{kind} {1e3 * seconds:.0f} ms" for kind, seconds in sorted(times.items(), key=lambda each: each[1]))
    return f"Attention that agrees with padded rows, and the time of a step: {shown}. Training takes the first that agrees."


def base_preset(names: Collection[str], card: Figures, device: Device) -> str:
    """The preset to lay the settings over: 'gpu-N' with the largest N (GB) that the card has; 'laptop' on a CPU."""
    sizes = {int(name[4:]): name for name in names if name.startswith("gpu-") and name[4:].isdigit()}
    fitting = [size for size in sizes if size * 1e9 <= card.get("total_bytes", 0.0)]
    if device == "cuda" and sizes:
        return sizes[max(fitting or [min(sizes)])]
    return "single-gpu" if device == "cuda" else "laptop"


def _step_times(step: Figures) -> dict[str, float]:
    return {key.split(".")[1]: value for key, value in step.items() if key.startswith("g8.") and key.endswith(".step_s")}


def _training(step: Figures) -> list[Advice]:
    """Budget and recomputation."""
    advice, times = [], _step_times(step)
    if "recompute" in times and not set(times) - {"recompute", "old"}:
        advice.append(Advice(name="training.recompute", value=True, reason="without it no step fitted into memory"))
    if budgets := _budgets(step):
        budget = smallest_near_best(budgets)
        reason = f"{budgets[budget]:,.0f} unique tokens/s, of at most {max(budgets.values()):,.0f}"
        advice.append(Advice(name="training.token_budget", value=budget, reason=reason))
    return advice


def engine_share(card: Figures, step: Figures) -> float:
    """Share of the card for the engine beside the trainer, in hundredths; 0 if the card is not known."""
    total = card.get("total_bytes", 0.0)
    if not total:
        return 0.0
    left = total - 1.1 * peak_gib(step) * _GIB - 2 * _GIB
    return min(0.9, max(0.2, math.floor(100 * left / total) / 100))


def peak_gib(step: Figures) -> float:
    """Peak memory of a step with the budget that is recommended; of any step if budgets were not measured; 0 if none was."""
    budgets = _budgets(step)
    if budgets and (peak := step.get(f"budget.{smallest_near_best(budgets)}.peak_gib")):
        return peak
    return max((value for key, value in step.items() if key.endswith(".peak_gib") and ".old." not in key), default=0.0)


def smallest_near_best(rates: Mapping[int, float]) -> int:
    """The smallest key whose rate is at least NEAR of the best."""
    best = max(rates.values())
    return min(key for key, rate in rates.items() if rate >= NEAR * best)


def as_toml(advice: list[Advice], remarks: Collection[str] = ()) -> str:
    """The settings as a file for `--config`; `remarks` become its first lines."""
    lines = [f"# {remark}" for remark in remarks]
    for section in _SECTIONS:
        own = [each for each in advice if each.name.startswith(f"{section}.")]
        if own:
            lines += ["", f"[{section}]"]
        lines += [f"{each.name.partition('.')[2]} = {json.dumps(each.value)} # {each.reason}" for each in own]
    return "\n".join([*lines, ""])


def _budgets(step: Figures) -> dict[int, float]:
    return _numbered(step, "budget.", ".unique_tokens_per_s")


def _numbered(figures: Figures, before: str, after: str = "") -> dict[int, float]:
    """Figures whose names are a number between `before` and `after`."""
    return {
        int(number): value
        for key, value in figures.items()
        if key.startswith(before) and key.endswith(after) and (number := key[len(before) : len(key) - len(after)]).isdigit()
    }
