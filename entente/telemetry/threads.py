"""Plans CPU threads before torch is imported.

Processes that compute at the same time must not have more threads in total than there are cores. OpenMP threads spin while they
wait: 2 + 2 threads on two cores took 3.5 times as long as 1 + 1. Processes that alternate may each use all cores.
"""

import os
import sys

from entente.telemetry.errors import InputError


def plan_threads(*, cores: int, engine: int, trainer: int, overlap: bool) -> tuple[int, int]:
    """Threads of (engine, trainer).

    Args:
        cores: number of usable cores.
        engine, trainer: threads from the settings; 0 means as many as fit.
        overlap: the two compute at the same time.

    Raises:
        InputError: more threads are requested than the cores allow.
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
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def apply_threads(threads: int) -> None:
    """Set the number of torch threads for this process and its children. Does nothing once torch is loaded.

    Variables that the user has set are kept. Waiting threads sleep instead of spinning: under other load, spinning made a
    training step take four times its CPU seconds or more.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
