"""Reward components of a user's own package, computed from the components that every row stores.

A reward is a pure function of one row's components. So it needs no new rollouts, equal rows have equal returns, and a past
choice of rows can be repeated while the package is there.
"""

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import numpy.typing as npt

from storage.schema import COMPONENTS, FINAL
from telemetry.errors import InputError
from telemetry.extensions import Misfit, check_arguments, check_named, load_part

Components = Mapping[str, npt.NDArray[np.float64]]
"""Reward component -> its value in each row, float64 [rows]: the change until the power's next decision in the fork."""
Reward = Callable[[Components], npt.NDArray[np.float64]]
"""A function from the components of some rows to one value per row, float64 [rows]."""

_ROWS = 8


def _accept(found: Reward, named: str) -> Reward:
    if not callable(found):
        raise Misfit("it is no function of the components of some rows")
    check_arguments(found, "components")
    tried = {name: np.sin(np.arange(1.0, _ROWS + 1) * place) for place, name in enumerate(COMPONENTS, start=1)}
    whole = np.asarray(found(tried), np.float64)
    if whole.shape != (_ROWS,):
        raise Misfit(f"it gives values of shape {whole.shape} for {_ROWS} rows")
    alone = [np.asarray(found({name: values[[row]] for name, values in tried.items()}), np.float64) for row in range(_ROWS)]
    if not np.array_equal(whole, np.concatenate(alone)):
        raise Misfit("it gives a row another value if other rows are computed with it, or no number")

    def reward(components: Components) -> npt.NDArray[np.float64]:
        try:
            values = np.asarray(found(components), np.float64)
        except Exception as error:
            raise InputError(f"the {named} failed ({type(error).__name__}: {error}): mend it") from error
        if values.shape != (rows := len(components[COMPONENTS[0]]),):
            raise InputError(f"the {named} gave values of shape {values.shape} for {rows} rows: mend it")
        return values

    return reward


_OURS: Mapping[str, Reward] = {name: lambda components, name=name: components[name] for name in COMPONENTS}


@cache
def reward_of(name: str) -> Reward:
    """The function of a reward component, by its name without `final_`.

    Raises:
        InputError: there is none, or it cannot be used.
    """
    check_named("reward component", name, _OURS)
    return _OURS[name] if name in _OURS else load_part("reward component", name, _accept)


def check_blend(weights: Mapping[str, float]) -> None:
    """Check that every name in a blend is a reward component. A user's own are loaded and tried.

    Raises:
        InputError: a name is unknown, or what it names cannot be used.
    """
    for name in weights:
        try:
            reward_of(name.removeprefix(FINAL))
        except InputError as error:
            raise InputError(f"storage.blend weighs {name}: {error}") from error
