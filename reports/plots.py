"""The report's plots: each takes the facts of a run and gives an SVG element, or None where there is nothing to draw."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from evaluation.score_files import ScoreRecord
from reports.drawing import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, legend_above, marker, new_plot, step_axis, to_svg
from reports.read_run import RunFacts

Series = Sequence[tuple[str, str, Sequence[float] | np.ndarray]]
"""Name, colour, a value per step."""


def returns(facts: RunFacts) -> str | None:
    """The learning curve: mean return of the rows each step trained on, with its interval."""
    mean = np.array(facts.series("train/return_mean"))
    if not np.isfinite(mean).any():
        return None
    figure, (axes,) = new_plot(high=3.2)
    steps = np.arange(1, facts.done + 1)
    bounds = [facts.rows.return_intervals.get(step, (np.nan, np.nan)) for step in steps.tolist()]
    low, high = np.array(bounds).T
    if facts.done > 1:
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.22, linewidth=0, label="95 % interval")
    else:
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


def scores(records: Sequence[tuple[str, ScoreRecord]]) -> str | None:
    """A dot and its interval for each (name, record), the first on top."""
    if not records:
        return None
    figure, (axes,) = new_plot(high=0.9 + 0.38 * len(records))
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=INK, alpha=0.12, linewidth=0.7)
    axes.axvline(0, color=INK, alpha=0.35, linewidth=0.8)
    for place, (_, record) in enumerate(records):
        score, colour = record.score, _colour(record)
        axes.hlines(place, score.low, score.high, color=colour, linewidth=3, alpha=0.45)
        axes.plot([score.mean], [place], "o", color=colour, markersize=7)
        axes.annotate(f"{score.mean:+.2f}", (score.mean, place), (0, 6), textcoords="offset points", ha="center", color=INK)
    axes.set_yticks(range(len(records)), [name for name, _ in records])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(records) - 0.5, -0.8)
    axes.margins(x=0.09)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("centres gained, with 95 % interval")
    told = "; ".join(f"{name} {record.score.mean:+.2f}" for name, record in records)
    return to_svg(figure, "scores", f"Scores on held-out positions: {told}.")


def _colour(record: ScoreRecord) -> str:
    if record.player != "policy":
        return GREY
    return BLUE if record.policy_version else ORANGE


def lags(facts: RunFacts) -> str | None:
    """How many rows were trained at which policy lag, up to the budget."""
    found = facts.rows.lags
    if not found:
        return None
    budget = int(facts.settings.get("storage", {}).get("max_policy_lag", 0))
    places = range(max(*found, budget) + 1) if budget else range(max(found) + 1)
    figure, (axes,) = new_plot()
    counts = [found.get(lag, 0) for lag in places]
    bars = axes.bar(places, counts, color=BLUE, width=0.7)
    axes.bar_label(bars, [f"{count:,}" if count else "none" for count in counts], padding=2, color=INK)
    axes.margins(y=0.15)
    axes.set_xticks(places)
    axes.set_xlabel("policy lag, versions")
    axes.set_ylabel("rows trained")
    told = ", ".join(f"{count} at lag {lag}" for lag, count in sorted(found.items()))
    return to_svg(figure, "lags", f"Rows trained by policy lag: {told}.")


def times(facts: RunFacts) -> str | None:
    """Wall time of each step, cut into parts that add up to it."""
    if not facts.steps:
        return None
    total, train, publish, rest = (
        np.array(facts.series(f"time/{name}")) for name in ("step_s", "train_s", "publish_s", "orchestration_s")
    )
    waited = np.clip(total - train - publish - rest, 0, None)
    figure, (axes,) = new_plot()
    parts = [("rollout", BLUE, waited), ("train", ORANGE, train), ("publish", GREEN, publish), ("orchestration", GREY, rest)]
    _stack(axes, parts)
    step_axis(axes, facts.done)
    axes.set_ylabel("seconds of wall time")
    legend_above(axes)
    whole = np.nansum(total)
    told = ", ".join(f"{name} {np.nansum(values) / whole:.0%}" for name, _, values in parts)
    return to_svg(figure, "times", f"Where the time of the steps went: {told}.")


def tokens(facts: RunFacts) -> str | None:
    """Tokens of each step by kind, and below them the share of prompt tokens that the prefix cache held."""
    if not facts.steps:
        return None
    prompt, cached, completion = (
        np.array(facts.series(f"rollout/{name}")) / 1000 for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    figure, (above, below) = new_plot(rows=2, high=3.6)
    _stack(
        above, [("prompt, computed", BLUE, prompt - cached), ("prompt, cached", GREY, cached), ("completion", ORANGE, completion)]
    )
    above.set_ylabel("thousand tokens")
    legend_above(above)
    share = facts.series("rollout/prefix_hit_share")
    below.plot(range(1, facts.done + 1), share, color=GREY, marker=marker(facts.done), markersize=4)
    below.set_ylim(0, 1)
    below.yaxis.set_major_formatter("{x:.0%}")
    below.set_ylabel("prefix hits")
    step_axis(below, facts.done)
    return to_svg(
        figure, "tokens", f"Tokens per step; {np.nansum(cached) / max(np.nansum(prompt), 1e-9):.0%} of prompt tokens were cached."
    )


def health(facts: RunFacts) -> list[tuple[str, str]]:
    """Small plots of what tells a sick training from a sound one, each with its sentence; none before the first step."""
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
        axes.yaxis.set_major_formatter("{x:.0%}")
    step_axis(axes, facts.done)
    axes.set_ylabel(unit)
    legend_above(axes)
    told = "; ".join(f"{label} from {values[0]:.3g} to {values[-1]:.3g}" for label, _, values in series)
    return to_svg(figure, name, f"{name.replace('-', ' ')}: {told}.")


def _stack(axes: Axes, parts: Series) -> None:
    """Bars upon one another, one outline for a part however many steps there are."""
    below = np.zeros(len(parts[0][2]))
    edges = np.arange(len(below) + 1) + 0.5
    for label, colour, values in parts:
        top = below + np.nan_to_num(np.asarray(values))
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=label, linewidth=0)
        below = top
