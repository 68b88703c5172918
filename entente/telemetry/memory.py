"""Memory of a long-lived process: private size, freed memory, garbage collection."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

GIVE_BACK_STEPS = 10

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt` (malloc.h)."""
_KEPT_BYTES = 2**30
_LARGE_BYTES = 2**25
"""Largest value that glibc accepts on every platform."""
_YOUNG = 50_000
"""Allocations between gen-0 collections, about the objects of a laptop step's games."""


def give_back_memory() -> None:
    """Return freed memory to the system (glibc only); several threads otherwise accumulate half-empty pages.

    Call it every tenth step and when the kind of work changes: after every laptop step it made steps a tenth longer."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep up to a gigabyte of freed memory for reuse, until `give_back_memory` (glibc only).

    Otherwise activations are returned after each backward and fetched again, a tenth of the trainer's CPU seconds on a laptop."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _LARGE_BYTES)


@contextmanager
def freeze_old_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and collect less often.

    The flow's process has a million library objects. By default every second step ran a full collection, a pause of 0.15 s or
    more.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def private_mib(pid: int, *, family: bool = False) -> float:
    """Resident pages without file-backed ones, MiB; 0 if the process has ended. `family`: include its children.

    File pages depend on the page cache: the same imports of torch had 92 MiB in one environment and 123 MiB in another."""
    try:
        process = psutil.Process(pid)
        members = [process, *(process.children(recursive=True) if family else ())]
        return sum(memory.rss - getattr(memory, "shared", 0) for memory in (each.memory_info() for each in members)) / 2**20
    except psutil.NoSuchProcess:
        return 0.0
