"""The learning curve of a training in stages: how strong each stage's model is, over hours."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.drawing import BLUE, GREY, new_plot, stand_alone, to_svg
from storage.runs import durable_write

CURVE = "stages.svg"
SHARES = ("win", "sos")  # measures that the seats of a game share out


def write_stages(folder: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Draw the stages into `folder`; at least one has ended."""
    durable_write(folder / CURVE, stand_alone(stages_plot(points)).encode())


def stages_plot(points: Sequence[Mapping[str, Any]]) -> str:
    """The curve as an SVG element: means with 95 % intervals, and the share that seven equal players have.

    Args:
        points: figures as in `stages.json`, by ascending hours.
    """
    figure, (axes,) = new_plot()
    hours, means = [point["hours"] for point in points], [point["mean"] for point in points]
    lengths = [point["mean"] - point["low"] for point in points], [point["high"] - point["mean"] for point in points]
    axes.plot(hours, means, color=GREY, linewidth=1)
    axes.errorbar(hours, means, yerr=lengths, color=BLUE, fmt="o", markersize=4, capsize=3)
    for point in points:
        above = {"textcoords": "offset points", "xytext": (0, 4), "ha": "center", "fontsize": 8}
        axes.annotate(point["stage"], (point["hours"], point["high"]), **above)
    axes.margins(x=0.15, y=0.15)
    axes.set_xlim(left=0)
    if points[-1]["measure"] in SHARES:
        axes.axhline(1 / 7, color=GREY, linewidth=1, linestyle="--")
        axes.annotate("seven equal players", (0, 1 / 7), textcoords="offset points", xytext=(4, 3), fontsize=8, color=GREY)
    axes.set_xlabel("hours of the training")
    axes.set_ylabel(points[-1]["measure"])
    last = points[-1]
    found = f"the model of {last['stage']} has {last['measure']} {last['mean']:.3f}"
    return to_svg(figure, "stages", f"Stages: after {last['hours']:.1f} hours {found}.")
