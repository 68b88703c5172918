"""Plots of the pipeline: seconds of a step by stage, policy lag of its rows, the rollout queue, and producers.

Each function takes the facts of a run and returns an SVG element, or None if there is nothing to draw.
"""

import numpy as np

from reports.drawing import (
    BLUE,
    BROWN,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    YELLOW,
    legend_above,
    marker,
    new_plot,
    share_axis,
    stack,
    step_axis,
    to_svg,
)
from reports.read_run import RunFacts
from telemetry.stages import STAGES, stages_of

_COLOURS = dict(zip(STAGES, (BLUE, TEAL, PURPLE, ORANGE, YELLOW, BROWN, RED, GREEN, GREY), strict=True))
_LAGS = (("0", GREEN), ("1", BLUE), ("2", ORANGE), ("more", RED))


def times(facts: RunFacts) -> str | None:
    """Wall time of each step, cut into parts that add up to it."""
    if not facts.steps:
        return None
    each = [stages_of(facts.steps.get(step, {})) for step in range(1, facts.done + 1)]
    parts = [(name, colour, np.array([found[name] for found in each])) for name, colour in _COLOURS.items()]
    figure, (axes,) = new_plot(high=3.2)
    stack(axes, parts)
    step_axis(axes, facts.done)
    axes.set_ylabel("seconds of wall time")
    legend_above(axes)
    whole = sum(float(values.sum()) for _, _, values in parts) or 1.0
    summary = ", ".join(f"{name} {values.sum() / whole:.0%}" for name, _, values in parts)
    return to_svg(figure, "times", f"Where the time of the steps went: {summary}.")


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
    summary = ", ".join(f"{count} at lag {lag}" for lag, count in sorted(found.items()))
    return to_svg(figure, "lags", f"Rows trained by policy lag: {summary}.")


def lags_by_step(facts: RunFacts) -> str | None:
    """Share of each step's rows at each policy lag; None if all have lag 0."""
    shares = {lag: np.nan_to_num(np.array(facts.series(f"train/policy_lag_{lag}_share"))) for lag, _ in _LAGS}
    if not any(shares[lag].any() for lag in ("1", "2", "more")):
        return None
    figure, (axes,) = new_plot()
    named = {"0": "its own", "1": "1 behind", "2": "2 behind", "more": "more"}
    stack(axes, [(named[lag], colour, shares[lag]) for lag, colour in _LAGS if shares[lag].any()])
    axes.set_ylim(0, 1)
    share_axis(axes)
    axes.set_ylabel("rows trained")
    step_axis(axes, facts.done)
    legend_above(axes)
    summary = ", ".join(f"{named[lag]} {values.mean():.0%}" for lag, values in shares.items())
    return to_svg(figure, "lags-by-step", f"Rows trained by policy lag, means over the steps: {summary}.")


def queue(facts: RunFacts) -> str | None:
    """Start groups ready, in flight and allowed ahead at each step; None if nothing was ever ahead."""
    ahead, ready, flying = (np.array(facts.series(f"queue/{name}")) for name in ("ahead", "ready", "in_flight"))
    if not np.nansum(ahead) and not np.nansum(flying):
        return None
    elsewhere = np.nan_to_num(np.array(facts.series("queue/in_flight_elsewhere")))
    figure, (axes,) = new_plot()
    steps = range(1, facts.done + 1)
    lines = [("ready", GREEN, ready), ("in flight", BLUE, flying), ("allowed ahead", GREY, ahead)]
    for name, colour, values in lines + [("elsewhere", PURPLE, elsewhere)] * bool(elsewhere.any()):
        axes.plot(steps, values, color=colour, marker=marker(facts.done), markersize=3.5, label=name, drawstyle="steps-mid")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("start groups")
    step_axis(axes, facts.done)
    legend_above(axes)
    summary = ", ".join(f"{name} {np.nanmean(values):.1f}" for name, _, values in lines)
    return to_svg(figure, "queue", f"Start groups, means over the steps: {summary}.")


def producers(facts: RunFacts) -> str | None:
    """Rollout producers at work and wanted at each step; None if there never was one."""
    working, wanted = (np.array(facts.series(f"queue/producers{name}")) for name in ("", "_asked"))
    if not np.nansum(working) and not np.nansum(wanted):
        return None
    figure, (axes,) = new_plot(high=2.5)
    steps = range(1, facts.done + 1)
    axes.step(steps, wanted, color=GREY, where="mid", linestyle="--", label="wanted by the controller")
    axes.step(steps, working, color=BLUE, where="mid", label="at work")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("producers")
    step_axis(axes, facts.done)
    legend_above(axes)
    return to_svg(figure, "producers", f"Rollout producers: at most {np.nanmax(working):.0f} at work.")
