"""The name of a policy loss, checked without torch: the trainer's own process tries a loss that an installed package brings."""

import os
import subprocess
import sys
from functools import lru_cache

from telemetry.errors import InputError, TrainingError
from telemetry.extensions import LOSSES, Extension, Registry

BUILT_IN = ("clipped", "dppo", "gspo", "sequence_mean")
"""Losses of `training/losses/`."""
_TRIAL = """
import sys
from telemetry.errors import InputError
from training.losses.choose import policy_loss
try:
    policy_loss(sys.argv[1])
except InputError as error:
    print(error)
    sys.exit(2)
"""
_TRIAL_S = 300.0
"""Importing torch takes seconds, on a busy machine half a minute."""


def _never(found: object, extension: Extension) -> None:
    raise AssertionError("a loss is loaded with torch only")


_NAMES: Registry[None] = Registry(LOSSES, dict.fromkeys(BUILT_IN), _never)


def check_loss_name(name: str) -> Extension | None:
    """Refuse a loss that is neither ours nor brought by an installed package; the package's, without loading it.

    Raises:
        InputError: names the package, if there is one, and the cure.
    """
    try:
        return _NAMES.check(name)
    except InputError as error:
        raise InputError(f"training.loss: {error}") from error


def try_loss(name: str) -> None:
    """Load and try a loss of a package in a process of its own, as the trainer does. This process stays without torch, whose
    number of threads may not be set yet.

    Raises:
        InputError: it cannot be used.
        TrainingError: the process that tried it broke.
    """
    if check_loss_name(name) is not None:
        _try(name)


@lru_cache
def _try(name: str) -> None:
    command = [sys.executable, "-P", "-c", _TRIAL, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_S, env=os.environ, check=False)
    if done.returncode == 2:
        raise InputError(f"training.loss: {done.stdout.strip()}")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise TrainingError(f"training.loss '{name}' could not be tried: {lines[-1] if lines else 'without a word'}")
