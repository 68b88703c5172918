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
"""Allocations between gen-0 collections: about as many as the games of one step of the laptop preset make."""


def give_back_memory() -> None:
    """Return freed memory to the system (glibc only); with several threads, partly free memory otherwise accumulates.

    Call it every `GIVE_BACK_STEPS` steps and when the kind of work changes: calling it after every step made the steps of the
    laptop preset 10 % slower."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep up to a gigabyte of freed memory for reuse, until `give_back_memory` (glibc only).

    Otherwise activation memory is returned to the system after each backward pass and requested again, which took 10 % of the
    trainer's CPU time on a laptop."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _LARGE_BYTES)


@contextmanager
def freeze_old_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and collect less often.

    The flow process holds about a million objects of imported libraries. With the default thresholds, every second step
    triggered a full collection, which paused the process for 0.15 s or more.
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
    """Resident memory without file-backed pages, in MiB; 0 if the process has ended. `family`: include its children.

    File-backed pages depend on the page cache: importing torch mapped 92 MiB in one environment and 123 MiB in another."""
    try:
        process = psutil.Process(pid)
        members = [process, *(process.children(recursive=True) if family else ())]
        return sum(memory.rss - getattr(memory, "shared", 0) for memory in (each.memory_info() for each in members)) / 2**20
    except psutil.NoSuchProcess:
        return 0.0
