"""The plot of a tuner's results: throughput against P99 latency, with the adapter on and off."""

from collections.abc import Sequence
from dataclasses import dataclass

from reports.drawing import BLUE, GREY, INK, ORANGE, legend_above, new_plot, stand_alone, to_svg


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate."""

    on: tuple[float, float]
    """P99 latency in ms and decisions per second, with the adapter."""
    off: tuple[float, float]
    """The same without the adapter."""
    current: bool = False
    chosen: bool = False


def tuning_plot(points: Sequence[Point], *, max_latency_ms: float) -> str:
    """The plot as an SVG file; the latency limit is drawn if it is near the points."""
    figure, (axes,) = new_plot(high=3.4)
    for name, label, colour in (("off", "adapter off", GREY), ("on", "adapter on", BLUE)):
        axes.scatter([getattr(p, name)[0] for p in points], [getattr(p, name)[1] for p in points], 22, colour, label=label)
    for flag, label, shape, colour in (("current", "in force", "s", INK), ("chosen", "chosen", "o", ORANGE)):
        marked = [point.on for point in points if getattr(point, flag)]
        if marked:
            across, up = zip(*marked, strict=True)
            axes.scatter(across, up, 90, facecolors="none", edgecolors=colour, marker=shape, label=label)
    furthest = max((x for p in points for x, _ in (p.on, p.off)), default=1.0)
    if max_latency_ms < 1.5 * furthest:
        axes.axvline(max_latency_ms, color=INK, linewidth=0.8, linestyle="--")
    axes.set_xlim(0, None)
    axes.set_ylim(0, None)
    axes.set_xlabel("P99 latency, ms")
    axes.set_ylabel("decisions a second")
    legend_above(axes)
    return stand_alone(to_svg(figure, "tuning", "Decisions a second against P99 latency of each candidate"))
