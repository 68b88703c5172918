"""The plot of growth: one panel per axis, both scales logarithmic, each figure over its value at the smallest size.

A line as steep as the dashed one grows linearly, a steeper one faster. The legend gives each figure's exponent.
"""

import io
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from reports.drawing import BLUE, BROWN, GREEN, GREY, INK, ORANGE, PURPLE, RED, TEAL, YELLOW, new_panels, stand_alone, to_svg
from reports.growth import Growth
from telemetry.errors import InputError

FORMATS = (".png", ".svg")
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, TEAL, RED, YELLOW, BROWN)
_ALT = "How costs grow: each figure over its value at the smallest size, on logarithmic scales"
_DOTS_PER_INCH = 150


def check_plot(file: Path) -> Path:
    """Check that a plot can be written to `file`.

    Raises:
        InputError: the name ends in neither .png nor .svg, or its folder is missing.
    """
    if file.suffix not in FORMATS:
        raise InputError(f"the plot '{file}' ends in neither {' nor '.join(FORMATS)}: give it one of these endings")
    if not file.parent.is_dir():
        raise InputError(f"the plot '{file}' cannot be written: make the folder '{file.parent}' first")
    return file


def growth_plot(growths: Sequence[Growth], format_: str) -> bytes:
    """The plot as a file.

    Args:
        format_: ".png" or ".svg".
    """
    figure, panels = new_panels(len(growths))
    for axes, growth in zip(panels, growths, strict=True):
        _draw(axes, growth)
    if format_ == ".svg":
        return stand_alone(to_svg(figure, "growth", _ALT)).encode()
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
    return written.getvalue()


def _draw(axes: Axes, growth: Growth) -> None:
    slopes, sizes = growth.exponents(), sorted(growth.points)
    for figure, colour in zip(growth.figures, cycle(_COLOURS), strict=False):
        values = growth.values(figure)
        if not values:
            continue
        first = next(iter(values.values()))
        ending = f" ({slopes[figure]:.2f})" if figure in slopes else ""
        words = growth.figures[figure].partition(",")[0]
        axes.plot(list(values), [value / first for value in values.values()], color=colour, marker="o", label=words + ending)
    axes.plot(sizes, [size / sizes[0] for size in sizes], color=GREY, linewidth=1, linestyle="--", label="linear (1.00)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(growth.axis)
    axes.set_ylabel("times the first")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, fontsize=7.5, frameon=False, labelcolor=INK)
