"""The value head as a baseline: what is left of a return after what the head foretold, weighed along the fork.

    F_i = w . (v_i - y_i)                         the return that the head foretells for decision i
    e_i = R_i - F_i = w . (end_i - v_i)           what it did not foretell; e after a fork's last decision is 0
    d_i = r_i + F_{i+1} - F_i = e_i - e_{i+1}     temporal difference; r_i = R_i - R_{i+1}
    G_i = sum_k lambda^k d_{i+k}                  generalised advantage estimate (Schulman et al. 2016, arXiv 1506.02438)

v_i is what the head says at the prompt, y_i the same two figures on the board of the decision, end_i those at the fork's end, and
w their weights in the return. i + 1 is the power's next decision in the fork that the step trains on. `training.advantages` then
subtracts the mean G of the others in the advantage group.

F_i depends on the board and not on the orders, so with lambda 1 it is a control variate (Greensmith et al. 2004, JMLR 5): the
gradient has the same expectation, however wrong the head is, and less noise where the head is right. Forks of a group whose
boards are equal have equal F, which then changes nothing. With lambda below 1 the head's errors are a bias.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from records.value_head import CENTRES_SCALE
from storage.schema import FINAL
from storage.settings import StorageSettings
from telemetry.errors import InputError
from training.settings import TrainingSettings

_FORETOLD = {"sos_share": 1.0, "centres_gained": CENTRES_SCALE}
"""Reward components that are changes of the head's figures, in its order, with the unit of the figure."""


def check_value_baseline(training: TrainingSettings, storage: StorageSettings) -> None:
    """Check that the head foretells all that returns count, if it is the baseline.

    Raises:
        InputError: it does not; names the settings and the cure.
    """
    if training.advantage_baseline != "value":
        return
    counted = {name.removeprefix(FINAL) for name, weight in storage.blend.items() if weight}
    if other := sorted(counted - set(_FORETOLD)):
        raise InputError(
            f"training.advantage_baseline is 'value', but storage.blend weighs {other[0]}, which no value head foretells: weigh "
            f"{' and '.join(_FORETOLD)} alone, or take the baseline 'group'"
        )
    if storage.discount != 1:
        raise InputError(
            f"training.advantage_baseline is 'value', but storage.discount is {storage.discount:g}, and the value head foretells "
            "ends without a discount: set it to 1, or take the baseline 'group'"
        )


def weights_of(blend: Mapping[str, float]) -> npt.NDArray[np.float64]:
    """w [2]: weights of the head's figures in returns of this blend."""
    return np.array([unit * (blend.get(name, 0.0) + blend.get(FINAL + name, 0.0)) for name, unit in _FORETOLD.items()])


def estimates(
    ends: npt.NDArray[np.float32],
    values: npt.NDArray[np.float32],
    sequences: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    gae_lambda: float,
) -> npt.NDArray[np.float64]:
    """G [rows] of the decisions of a step.

    Args:
        ends: [rows, 2] as in `Batch`.
        values: [rows, 2] what the head foretold.
        sequences: [rows, 2] as in `Batch`.
        weights: [2] from `weights_of`.
    """
    errors = (ends.astype(np.float64) - values) @ weights
    found = errors.copy()
    order = np.lexsort((sequences[:, 1], sequences[:, 0])).tolist()
    for at, following in zip(order[-2::-1], order[:0:-1], strict=True):
        if sequences[at, 0] == sequences[following, 0]:
            found[at] = errors[at] - errors[following] + gae_lambda * found[following]
    return found
