"""CPU threads in one place, decided before torch is imported anywhere.

Processes that compute at the same time must together have no more threads than there are cores: OpenMP threads spin
while they wait,
and 2 + 2 threads on two cores cost three and a half times the time. Processes that alternate may each use every core.
"""

import os
import sys

from telemetry.errors import InputError


def plan_threads(*, cores: int, engine: int, trainer: int, overlap: bool) -> tuple[int, int]:
    """Threads of engine and trainer.

    Args:
        cores: cores this process may use.
        engine, trainer: what the settings ask for; 0 means whatever fits.
        overlap: the two compute at the same time.

    Raises:
        InputError: the wish does not fit the cores.
    """
    if not overlap:
        wanted = (engine or cores, trainer or cores)
        if max(wanted) > cores:
            raise InputError(
                f"inference.threads {wanted[0]} and training.threads {wanted[1]} must each be at most the {cores} cores"
            )
        return wanted
    if not engine and not trainer:
        engine = max(1, cores // 2)
    engine = engine or max(1, cores - trainer)
    trainer = trainer or max(1, cores - engine)
    if engine + trainer > max(cores, 2):
        raise InputError(
            f"inference.threads {engine} and training.threads {trainer} exceed the {cores} cores while both compute at once: "
            f"lower one of them, or set pipeline.buffer_depth to 0 so that they alternate"
        )
    return engine, trainer


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def apply_threads(threads: int) -> None:
    """Give this process, and those it starts, `threads` for torch, if torch is not loaded yet; what the user has set stands.

    Waiting threads sleep instead of spinning: beside any other load, spinning made a training step cost four times its CPU
    seconds and more.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
