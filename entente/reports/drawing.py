"""Style of the report's plots, and matplotlib figures as inline SVG with ids unique in a page.

Text takes the colour of the page, so plots work on light and dark pages. pyplot is not used, because it keeps figures alive."""

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
PINK, NAVY = "#d98cb3", "#4a5a8a"
"""Mid tones, visible on light and dark backgrounds and with colour blindness."""
INK = "#010203"
"""Placeholder of the text colour, which `to_svg` replaces."""
MANY_STEPS = 60

_WIDE, _HIGH = 5.6, 2.9  # inches; at 72 units per inch the text is about as large as the page's
_LEGEND_LETTERS, _LEGEND_GAPS = 66, 6  # letters of a row on average; letters that handle and gaps of a name take
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
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDE, high), layout="constrained")
        axes = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    for each in axes:
        each.grid(axis="y", color=INK, alpha=0.12, linewidth=0.7)
        each.set_axisbelow(True)
    return figure, axes


def step_axis(axes: Axes, steps: int) -> None:
    axes.set_xlim(0.4, max(steps, 1) + 0.6)
    whole_axis(axes, "step")


def whole_axis(axes: Axes, label: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axes.set_xlabel(label)


def share_axis(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def marker(steps: int) -> str | None:
    """None if there are many steps. A run of one step has no line, so it needs a marker."""
    return "o" if steps <= MANY_STEPS else None


def legend_above(axes: Axes) -> None:
    longest = max(map(len, axes.get_legend_handles_labels()[1]), default=1)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=min(4, max(1, int(_LEGEND_LETTERS / (_LEGEND_GAPS + longest)))),
        columnspacing=1.2,
        handlelength=1.3,
        borderaxespad=0.2,
        frameon=False,
        labelcolor=INK,
    )


def stack(axes: Axes, parts: Sequence[tuple[str, str, Sequence[float] | np.ndarray]]) -> None:
    below = np.zeros(len(parts[0][2]))
    edges = np.arange(len(below) + 1) + 0.5
    for label, colour, values in parts:
        top = below + np.nan_to_num(np.asarray(values))
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=label, linewidth=0)
        below = top


def to_svg(figure: Figure, name: str, alt: str) -> str:
    """`name`: prefix of the SVG's ids; `alt`: its description."""
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
