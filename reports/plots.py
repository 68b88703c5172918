"""The report's plots of learning and of tokens.

Each function takes the facts of a run and returns an SVG element, or None if there is nothing to draw.
"""

from collections.abc import Sequence

import numpy as np

from reports.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    legend_above,
    marker,
    new_plot,
    share_axis,
    stack,
    step_axis,
    to_svg,
)
from reports.read_run import RunFacts

Series = Sequence[tuple[str, str, Sequence[float] | np.ndarray]]
"""Name, colour, a value per step."""


def returns(facts: RunFacts) -> str | None:
    """The learning curve: mean return of each step's training rows, with its interval."""
    mean = np.array(facts.series("train/return_mean"))
    if not np.isfinite(mean).any():
        return None
    figure, (axes,) = new_plot(high=3.2)
    steps = np.arange(1, facts.done + 1)
    bounded = any(step in facts.rows.return_intervals for step in steps.tolist())
    bounds = [facts.rows.return_intervals.get(step, (np.nan, np.nan)) for step in steps.tolist()]
    low, high = np.array(bounds).T
    if bounded and facts.done > 1:
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.22, linewidth=0, label="95 % interval")
    elif bounded:
        axes.vlines(steps, low, high, color=BLUE, alpha=0.5, linewidth=3, label="95 % interval")
    axes.plot(steps, mean, color=BLUE, marker=marker(facts.done), markersize=4, label="rows trained on")
    drawn = [facts.rows.return_of_all.get(step - 1, np.nan) for step in steps.tolist()]
    axes.plot(
        steps, drawn, color=ORANGE, linestyle="--", marker=None if facts.done > 1 else "o", linewidth=1.3, label="all rows drawn"
    )
    step_axis(axes, facts.done)
    axes.set_ylabel("mean return, centres")
    legend_above(axes)
    last = f"{mean[np.isfinite(mean)][-1]:+.2f}"
    return to_svg(figure, "returns", f"Mean return per step: {mean[np.isfinite(mean)][0]:+.2f} at first, {last} at last.")


def tokens(facts: RunFacts) -> str | None:
    """Tokens of each step by kind, and below them the share of prompt tokens that the prefix cache held."""
    if not facts.steps:
        return None
    prompt, cached, completion = (
        np.array(facts.series(f"rollout/{name}")) / 1000 for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    figure, (above, below) = new_plot(rows=2, high=3.6)
    stack(
        above, [("prompt, computed", BLUE, prompt - cached), ("prompt, cached", GREY, cached), ("completion", ORANGE, completion)]
    )
    above.set_ylabel("thousand tokens")
    legend_above(above)
    share = facts.series("rollout/prefix_hit_share")
    below.plot(range(1, facts.done + 1), share, color=GREY, marker=marker(facts.done), markersize=4)
    below.set_ylim(0, 1)
    share_axis(below)
    below.set_ylabel("prefix hits")
    step_axis(below, facts.done)
    return to_svg(
        figure, "tokens", f"Tokens per step; {np.nansum(cached) / max(np.nansum(prompt), 1e-9):.0%} of prompt tokens were cached."
    )


def health(facts: RunFacts) -> list[tuple[str, str]]:
    """Small plots of the training's health metrics, each with a sentence; none before the first step."""
    if not facts.steps:
        return []
    return [
        (
            _lines(facts, "entropy", "nats", [("mean over the legal set", BLUE, facts.series("train/entropy"))]),
            "Entropy: how undecided the policy is among legal tokens. A fall to 0 in a few steps is a collapse.",
        ),
        (
            _lines(
                facts,
                "clipping",
                "share of tokens",
                [
                    ("low", BLUE, facts.series("train/clipped_low_share")),
                    ("high", ORANGE, facts.series("train/clipped_high_share")),
                    ("left out", GREY, facts.series("train/left_out_share")),
                ],
                per_cent=True,
            ),
            "Clip shares: tokens whose ratio was cut from below or above, and outliers left out of the loss.",
        ),
        (
            _lines(
                facts,
                "legal-mass",
                "share",
                [
                    ("median", GREEN, facts.series("train/legal_mass_p50")),
                    ("10th percentile", PURPLE, facts.series("train/legal_mass_p10")),
                ],
                per_cent=True,
            ),
            "Legal mass: what the unmasked model gives to legal tokens. The loss does not hold it; the mask does its work.",
        ),
        (
            _lines(facts, "gradient", "norm", [("largest of the step's updates", ORANGE, facts.series("train/gradient_norm"))]),
            f"Gradient norm before clipping to {facts.settings.get('training', {}).get('max_gradient_norm', '?')}.",
        ),
    ]


def _lines(facts: RunFacts, name: str, unit: str, series: Series, *, per_cent: bool = False) -> str:
    figure, (axes,) = new_plot(high=2.5)
    for label, colour, values in series:
        axes.plot(range(1, facts.done + 1), values, color=colour, marker=marker(facts.done), markersize=3.5, label=label)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if per_cent:
        share_axis(axes)
    step_axis(axes, facts.done)
    axes.set_ylabel(unit)
    legend_above(axes)
    known = {label: [value for value in values if np.isfinite(value)] for label, _, values in series}
    summary = "; ".join(f"{label} from {values[0]:.3g} to {values[-1]:.3g}" for label, values in known.items() if values)
    return to_svg(figure, name, f"{name.replace('-', ' ')}: {summary}.")
