"""Reward components of installed packages, computed from the components that every row stores.

A reward is a pure function of one row's components. So it needs no new rollouts, equal rows have equal returns, and a past
choice of rows can be repeated while the package is installed.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from storage.schema import COMPONENTS, FINAL
from telemetry.errors import InputError
from telemetry.extensions import REWARDS, Extension, Misfit, Registry, check_arguments

Components = Mapping[str, npt.NDArray[np.float64]]
"""Reward component -> its value in each row, float64 [rows]: the change until the power's next decision in the fork."""
Reward = Callable[[Components], npt.NDArray[np.float64]]
"""A function from the components of some rows to one value per row, float64 [rows]."""

_ROWS = 8


def _accept(found: Reward, extension: Extension) -> Reward:
    if not callable(found):
        raise Misfit("is no function of the components of some rows")
    check_arguments(found, "components")
    tried = {name: np.sin(np.arange(1.0, _ROWS + 1) * place) for place, name in enumerate(COMPONENTS, start=1)}
    whole = np.asarray(found(tried), np.float64)
    if whole.shape != (_ROWS,):
        raise Misfit(f"gives values of shape {whole.shape} for {_ROWS} rows")
    alone = [np.asarray(found({name: values[[row]] for name, values in tried.items()}), np.float64) for row in range(_ROWS)]
    if not np.array_equal(whole, np.concatenate(alone)):
        raise Misfit("gives a row another value if other rows are computed with it, or no number")

    def reward(components: Components) -> npt.NDArray[np.float64]:
        try:
            values = np.asarray(found(components), np.float64)
        except Exception as error:
            raise InputError(f"the {extension.text} failed ({type(error).__name__}: {error}): mend that package") from error
        if values.shape != (rows := len(components[COMPONENTS[0]]),):
            raise InputError(f"the {extension.text} gave values of shape {values.shape} for {rows} rows: mend that package")
        return values

    return reward


_OURS: Mapping[str, Reward] = {name: lambda components, name=name: components[name] for name in COMPONENTS}
_REGISTRY: Registry[Reward] = Registry(REWARDS, _OURS, _accept)


def reward_of(name: str) -> Reward:
    """The function of a reward component, by its name without `final_`.

    Raises:
        InputError: there is none, or that of a package cannot be used.
    """
    return _REGISTRY.get(name)


def check_blend(weights: Mapping[str, float]) -> None:
    """Check that every name in a blend is a reward component. Those of packages are loaded and tried.

    Raises:
        InputError: a name is unknown, or its package cannot be used.
    """
    for name in weights:
        try:
            _REGISTRY.check(name.removeprefix(FINAL))
            reward_of(name.removeprefix(FINAL))
        except InputError as error:
            raise InputError(f"storage.blend weighs {name}: {error}") from error
