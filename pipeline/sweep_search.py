"""Which values a sweep tries: all combinations, random ones, or those that optuna's TPE chooses by the scores so far.

A *point* is one choice of values, dotted name -> value. The same earlier points and scores give the same next point, so a resumed
sweep goes on as it would have. Combinations are listed and halving is decided here, in a few lines; every draw is optuna's.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, StrictFloat, StrictInt, Tag, model_validator

from telemetry.errors import InputError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Search = Literal["grid", "random", "halving", "tpe"]
Point = dict[str, Any]
RANDOM_FIRST = 10
"""Points that 'tpe' draws at random before it goes by scores, optuna's own number."""
_BY_SCORES = 50
"""Draws in which TPE must find a new point; after these the point is drawn at random, as TPE may insist on one that was tried."""
_DRAWS = 5_000
"""Draws in which a new point must be found."""
Number = StrictInt | StrictFloat


class Range(BaseModel):
    """Numbers from `low` to `high`, both included; whole ones if `low`, `high` and `step` are whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, title="Range")

    low: Number
    """Lowest value."""
    high: Number
    """Highest value."""
    log: bool = False
    """Whether equal factors are equally probable, as for learning rates, instead of equal differences."""
    step: Number | None = None
    """Difference of neighbouring values; none: 1 for whole numbers, and any for others."""

    @model_validator(mode="after")
    def _check(self) -> "Range":
        if not math.isfinite(self.low) or not math.isfinite(self.high):
            raise ValueError(f"the range from {self.low} to {self.high} has no end: give finite numbers")
        if self.low >= self.high:
            raise ValueError(f"the range from {self.low} to {self.high} is empty: low must be below high")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError(f"a range with log takes a low above 0 and no step, not low {self.low} and step {self.step}")
        if self.step is not None and (self.step <= 0 or self._exact(self.high, self.low) % Decimal(str(self.step))):
            raise ValueError(f"steps of {self.step} do not lead from {self.low} to {self.high}: change step or high")
        return self

    @staticmethod
    def _exact(high: float, low: float) -> Decimal:
        return Decimal(str(high)) - Decimal(str(low))

    @property
    def _step(self) -> float | None:
        """Difference of neighbouring values; None: there are no neighbours."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return 1 if self.step is None and whole else self.step

    def __len__(self) -> int:
        """Number of values.

        Raises:
            TypeError: they cannot be counted.
        """
        if self._step is None:
            raise TypeError("a range without steps has no length")
        return int(self._exact(self.high, self.low) / Decimal(str(self._step))) + 1

    @property
    def distribution(self) -> "BaseDistribution":
        """The range as optuna has it."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.low, int) and isinstance(self.high, int) and isinstance(self._step, int):
            return IntDistribution(self.low, self.high, log=self.log, step=self._step)
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)


def _kind(given: Any) -> str:
    return "range" if isinstance(given, Range | Mapping) else "values"


Values = Annotated[Annotated[list[Any], Tag("values")] | Annotated[Range, Tag("range")], Discriminator(_kind)]
"""Values of a setting."""


def combinations(settings: Mapping[str, Values]) -> float:
    """Number of combinations of all values; infinite with a range that has no steps."""
    counts = (math.inf if isinstance(values, Range) and values._step is None else len(values) for values in settings.values())
    return math.prod(counts)


def every_combination(settings: Mapping[str, Sequence[Any]]) -> list[Point]:
    """All combinations of values; the last setting varies fastest."""
    return [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]


def each_value(settings: Mapping[str, Values]) -> Iterator[Point]:
    """Points in which each value and each end of a range occurs, beside the first value of every other setting."""
    shown = {name: [values.low, values.high] if isinstance(values, Range) else values for name, values in settings.items()}
    first = {name: values[0] for name, values in shown.items()}
    yield first
    for name, values in shown.items():
        yield from (first | {name: value} for value in values[1:])


def draw(
    settings: Mapping[str, Values],
    seed: int,
    earlier: Mapping[int, float | None],
    points: Sequence[Point],
    accepts: Callable[[Point], bool],
) -> Point:
    """A new point: one that is not among `points`, and that `accepts` takes.

    Args:
        seed: of the draw; with the number of points it gives the random numbers.
        earlier: place in `points` -> the score of that point, higher is better, None if it failed; empty: draw at random.
    """
    import optuna
    from optuna.samplers import RandomSampler, TPESampler

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {name: _distribution(values) for name, values in settings.items()}
    numbers = (seed * _DRAWS + len(points)) % 2**32
    by_chance = RandomSampler(seed=numbers)
    sampler = TPESampler(seed=numbers, n_startup_trials=RANDOM_FIRST) if earlier else by_chance
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for place, score in earlier.items():
        drawn = {name: _drawn(settings[name], value) for name, value in points[place].items()}
        state = optuna.trial.TrialState.FAIL if score is None else optuna.trial.TrialState.COMPLETE
        study.add_trial(optuna.create_trial(params=drawn, distributions=space, value=score, state=state))
    for number in range(_DRAWS):
        if number == _BY_SCORES:
            study.sampler = by_chance
        trial = study.ask(space)
        point = {name: _value(settings[name], drawn) for name, drawn in trial.params.items()}
        if point not in points and accepts(point):
            return point
    raise InputError(f"only {len(points)} combinations of values were found that the settings accept: lower samples")


def _distribution(values: Values) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution

    return values.distribution if isinstance(values, Range) else CategoricalDistribution(tuple(range(len(values))))


def _drawn(values: Values, value: Any) -> Any:
    """What optuna drew for this value: of a list, the place in it, because a value may itself be a list."""
    return value if isinstance(values, Range) else values.index(value)


def _value(values: Values, drawn: Any) -> Any:
    """The value for what optuna drew; of a range without steps to four digits, which a table can show."""
    if not isinstance(values, Range):
        return values[drawn]
    return drawn if values._step is not None else min(max(float(f"{drawn:.4g}"), values.low), values.high)


def survivors(scores: Mapping[int, float]) -> set[int]:
    """The best third of the points, at least one; of equal ones the earlier. `scores`: place of the point -> its mean."""
    ranked = sorted(scores, key=lambda point: (-scores[point], point))
    return set(ranked[: math.ceil(len(ranked) / 3)])
