"""Plots of several runs: an SVG element, or None if there is nothing to draw. A run has one colour in all of them."""

from entente.reports.compared import Compared, Paired
from entente.reports.drawing import (
    BLUE,
    BROWN,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    YELLOW,
    legend_above,
    new_plot,
    to_svg,
    whole_axis,
)
from entente.reports.plots import band, dots

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, YELLOW, BROWN)


def returns(compared: Compared) -> str | None:
    drawn = [(run, colour) for run, colour in zip(compared.runs, COLOURS, strict=False) if run.curve]
    if not drawn:
        return None
    figure, (axes,) = new_plot(high=3.4)
    for run, colour in drawn:
        places = [(point.first + point.last) / 2 for point in run.curve]
        band(axes, places, [point.mean_return for point in run.curve], colour, run.name)
    whole_axis(axes, "step")
    axes.set_ylabel("mean return, centres")
    legend_above(axes)
    ends = "; ".join(f"{run.name} {run.curve[-1].mean_return.mean:+.2f}" for run, _ in drawn)
    return to_svg(figure, "returns", f"Mean return by step, at last: {ends}.")


def paired(compared: Compared) -> str | None:
    colours = {run.name: colour for run, colour in zip(compared.runs, COLOURS, strict=False)}
    drawn = [(pair, pair.comparison.difference) for pair in compared.paired if not isinstance(pair.comparison, str)]
    rows = [(_row_name(pair, compared), difference, colours[pair.other]) for pair, difference in drawn]
    summary = "; ".join(f"{name} {difference.mean:+.2f}" for name, difference, _ in rows)
    alt = f"Differences from {compared.runs[0].name} on the same positions: {summary}."
    return dots(rows, "paired", f"centres gained more than {compared.runs[0].name}", alt, "{:+.2f}", 0.0)


def _row_name(pair: Paired, compared: Compared) -> str:
    return pair.label if len(compared.runs) == 2 else f"{pair.other}, {pair.label}"
