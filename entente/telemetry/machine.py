"""Usable cores and memory, thread counts to set before torch is imported, and the environment record of a run.

Processes that compute at the same time must not have more threads than cores in total: OpenMP threads spin while they wait, and
2 + 2 threads on two cores took 3.5 times as long as 1 + 1.
"""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import psutil

from entente.telemetry.cards import visible_cards
from entente.telemetry.control_groups import allowed_cores, available_memory
from entente.telemetry.errors import InputError
from entente.telemetry.vllm_environment import find_vllm

PACKAGES = ("torch", "transformers", "prefect", "duckdb", "pyarrow", "diplomacy")
ABSENT = "absent"


def environment() -> dict[str, str]:
    """Imports no package; a missing one is "absent". vLLM and "vllm_torch" are those of vLLM's own environment.

    Raises InputError if the variable of that environment names no program.
    """
    vllm = find_vllm()
    return {
        "vllm": (vllm and vllm.text) or ABSENT,
        "vllm_torch": (vllm and vllm.torch) or ABSENT,
        **{name: package_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(aliased=True),
        "cpu_cores": str(usable_cores()),
        "gpus": ", ".join(card.name for card in visible_cards()) or "none",
    }


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def plan_threads(*, cores: int, engine: int, trainer: int, overlap: bool) -> tuple[int, int]:
    """Threads of (engine, trainer); 0 asks for as many as fit. `overlap`: the two compute at the same time.

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
    """Cores that this process may use, on this machine or in this container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return allowed_cores(cores)


def free_memory() -> int:
    """Bytes that programs may still allocate on this machine, or in this container."""
    return available_memory(psutil.virtual_memory().available)


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def apply_threads(threads: int) -> None:
    """Set the torch threads of this process and its children; no effect once torch is imported. The user's variables win.

    Waiting threads sleep: under other load, spinning took four times the CPU seconds of a training step or more."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
