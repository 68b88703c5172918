"""Checks the setting `training.loss` without importing torch; a user's own loss is tried in a process of its own."""

import os
import subprocess
import sys
from functools import lru_cache

from entente.telemetry.errors import InputError, TrainingError
from entente.telemetry.extensions import check_named

BUILT_IN = ("cispo", "clipped", "dppo", "gspo", "sequence_mean")
"""Names of the losses in `entente/training/losses.py`."""
_TRIAL = """
import sys
from entente.telemetry.errors import InputError
from entente.training.losses import policy_loss
try:
    policy_loss(sys.argv[1])
except InputError as error:
    print(error)
    sys.exit(2)
"""
_TRIAL_S = 300.0
"""Time limit of a trial. Importing torch takes seconds, on a busy machine half a minute."""


def check_loss_name(name: str) -> None:
    """Refuse a loss that is neither built-in nor a `module:attribute`. Nothing is loaded.

    Raises:
        InputError: names the setting and the losses.
    """
    try:
        check_named("loss", name, BUILT_IN)
    except InputError as error:
        raise InputError(f"training.loss: {error}") from error


def try_loss(name: str) -> None:
    """Load and try a user's own loss in a process of its own. This process does not import torch, because the number of torch's
    threads may not be set yet.

    Raises:
        InputError: the loss cannot be used.
        TrainingError: the process that tried it failed.
    """
    check_loss_name(name)
    if name not in BUILT_IN:
        _try(name)


@lru_cache
def _try(name: str) -> None:
    command = [sys.executable, "-P", "-c", _TRIAL, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S, env=os.environ, check=False)
    if done.returncode == 2:
        raise InputError(f"training.loss: {done.stdout.strip()}")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise TrainingError(f"training.loss '{name}' could not be tried: {lines[-1] if lines else 'no message'}")
