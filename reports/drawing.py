"""The look of every plot of the report, and the change of a matplotlib figure into SVG that shares a page with others.

Ids of two plots never meet. Text stays text. Lines and words take the colour of the page's text, so a plot reads on a light and
on a dark page. pyplot is not used, because it keeps figures alive.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

BLUE, ORANGE, GREEN, PURPLE, GREY = "#3d85c6", "#e0852f", "#3c9f73", "#a06cc4", "#8b929c"
TEAL, RED, YELLOW, BROWN = "#2f9fb3", "#d0605e", "#c9a227", "#9c6b4a"
"""Mid tones: each is told from light and from dark ground, and from the others where colours look alike."""
INK = "#010203"
"""Stands for the colour of text until the SVG is written."""
MANY_STEPS = 60
"""From here on a line has no marker at each step."""

_WIDE, _HIGH = 5.6, 2.9  # inches; at 72 units an inch the words come out near the size of the page's
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "entente",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def new_plot(*, rows: int = 1, high: float = _HIGH) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` plots over one another that share their steps."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDE, high), layout="constrained")
        axes = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    for each in axes:
        each.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)
        each.set_axisbelow(True)
    return figure, axes


def step_axis(axes: Axes, steps: int) -> None:
    """Whole steps from 1 to `steps` along the bottom."""
    axes.set_xlim(0.4, max(steps, 1) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.set_xlabel("step")


def share_axis(axes: Axes) -> None:
    """Per cent along the left side, with as many digits as tell each tick's true value."""
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def marker(steps: int) -> str | None:
    """A dot at each step as long as they are few: a run of one step has no line."""
    return "o" if steps <= MANY_STEPS else None


def legend_above(axes: Axes) -> None:
    """Names of the series in one row above the plot, where they hide nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=4,
        columnspacing=1.2,
        handlelength=1.3,
        borderaxespad=0.2,
        frameon=False,
        labelcolor=INK,
    )


def stack(axes: Axes, parts: Sequence[tuple[str, str, Sequence[float] | np.ndarray]]) -> None:
    """Bars of (name, colour, a value per step) upon one another, one outline for a part however many steps there are."""
    below = np.zeros(len(parts[0][2]))
    edges = np.arange(len(below) + 1) + 0.5
    for label, colour, values in parts:
        top = below + np.nan_to_num(np.asarray(values))
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=label, linewidth=0)
        below = top


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an `<svg>` element; `name` makes its ids its own, `alt` says what it shows."""
    written = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(
            written, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r" width=\"[\d.]+pt\" height=\"[\d.]+pt\"", "", text, count=1)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"\b(id=\"|href=\"#|url\(#)", rf"\g<1>{name}-", text)
    text = re.sub(r"\s*\n\s*", " ", text).replace(INK, "currentColor")
    opening = f'<svg role="img" aria-label="{_attribute(alt)}" style="stroke-linejoin: round; stroke-linecap: butt"'
    return text.replace("<svg", opening, 1).strip()


def stand_alone(svg: str) -> str:
    """The same picture as a file of its own, dark on a light card."""
    view = re.search(r"viewBox=\"0 0 ([\d.]+) ([\d.]+)\"", svg)
    assert view is not None, "every plot has a view box"
    opening, rest = svg.split(">", 1)
    card = f'<rect width="{view[1]}" height="{view[2]}" fill="#ffffff"/>'
    opening = opening.replace(
        "<svg", f'<svg width="{view[1]}pt" height="{view[2]}pt" color="#24292f" font-family="sans-serif"', 1
    )
    return f"{opening}>{card}{rest}\n"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
