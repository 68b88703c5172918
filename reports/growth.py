"""How a cost grows with a size: its values at several sizes, and its exponent.

The exponent is the slope of the least-squares line through the logarithms of size and value: 0 for a constant cost, 1 for a
cost that grows linearly, above 1 for one that grows faster. Nothing is measured here.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Figures along one axis."""

    axis: str
    """What grows, in one word, as "steps"."""
    figures: Mapping[str, str]
    """Each figure's words, with its unit, as "time of a step, s"."""
    points: Mapping[int, Mapping[str, float]]
    """Size -> figure -> value. A figure that was not counted at a size is absent there."""

    def values(self, figure: str) -> dict[int, float]:
        """The values of a figure by size, smallest size first; those that are not above 0 have no logarithm and are left out."""
        return {size: value for size in sorted(self.points) if (value := self.points[size].get(figure, 0.0)) > 0}

    def exponents(self) -> dict[str, float]:
        """The exponent of each figure that has at least two values."""
        found = {figure: exponent(self.values(figure).items()) for figure in self.figures}
        return {figure: slope for figure, slope in found.items() if slope is not None}

    def metrics(self) -> dict[str, float]:
        """All values and exponents by name, as "steps_20_step_s" and "steps_step_s_exponent"."""
        named = {f"{self.axis}_{size}_{figure}": value for size, point in self.points.items() for figure, value in point.items()}
        return named | {f"{self.axis}_{figure}_exponent": slope for figure, slope in self.exponents().items()}


def exponent(points: Iterable[tuple[float, float]]) -> float | None:
    """The least-squares slope of log(value) over log(size); None for fewer than two sizes. Sizes and values are above 0."""
    pairs = [(math.log(size), math.log(value)) for size, value in points]
    if len({size for size, _ in pairs}) < 2:
        return None
    sizes, values = np.array(pairs).T
    sizes -= sizes.mean()
    return float(sizes @ (values - values.mean()) / (sizes @ sizes))
