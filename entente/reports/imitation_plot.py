"""The learning curve of a base model that imitates: losses, and the share of orders equal to the teacher's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entente.decoding.model_files import RECIPE
from entente.reports.drawing import BLUE, GREEN, GREY, ORANGE, legend_above, marker, new_plot, share_axis, stand_alone, to_svg
from storage.files import durable_write
from storage.json_files import read_object

CURVE = "curve.svg"


def write_curve(model: Path) -> None:
    """Draw the curve in the model's recipe into its folder."""
    durable_write(model / CURVE, stand_alone(imitation_plot(read_object(model / RECIPE)["curve"])).encode())


def imitation_plot(curve: Sequence[Mapping[str, Any]]) -> str:
    """The curve as an SVG element.

    Args:
        curve: points as in a recipe, by ascending step.
    """
    steps = [point["step"] for point in curve]
    figure, (above, below) = new_plot(rows=2, high=4.2)
    for name, label, colour in (
        ("order_loss", "held out, per order token", BLUE),
        ("completion_loss", "held out, per completion token", ORANGE),
        ("loss", "trained on", GREY),
    ):
        known = [(point["step"], point[name]) for point in curve if point[name] is not None]
        if known:
            above.plot(*zip(*known, strict=True), color=colour, marker=marker(len(curve)), markersize=3.5, label=label)
    above.set_yscale("log")
    above.set_ylabel("nats a token")
    legend_above(above)
    below.plot(steps, [point["orders_equal"] for point in curve], color=GREEN, marker=marker(len(curve)), markersize=3.5)
    below.set_ylim(0, 1)
    share_axis(below)
    below.set_ylabel("orders equal")
    below.set_xlabel("step")
    last = curve[-1]
    found = f"{last['order_loss']:.2f} nats per order token and {last['orders_equal']:.0%} of orders equal"
    return to_svg(figure, "imitation", f"Imitation: after {last['step']} steps {found}.")
