"""Memory of a long-lived process: its private size, freed memory, and the garbage collector."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

GIVE_BACK_STEPS = 10
"""Training steps between returns of freed memory to the system."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of glibc's `mallopt` (malloc.h)."""
_KEPT_BYTES = 2**30
_LARGE_BYTES = 2**25
"""The largest value that glibc accepts on every platform."""
_YOUNG = 50_000
"""New objects between collections of the youngest generation, about the number of a laptop step's games."""


def give_back_memory() -> None:
    """Return freed memory to the system; a process with several threads otherwise accumulates half-empty pages. Only with glibc.

    The call takes about a millisecond, but later allocations get new pages from the kernel: a call after every step of the laptop
    preset made steps a tenth longer. So call it every tenth step, and when the kind of work changes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep up to a gigabyte of freed memory for later allocations, until `give_back_memory`. Does nothing without glibc.

    By default glibc returns the free end of its heap, and large blocks one by one. A trainer's activations would be returned
    after each backward pass and fetched again in the next forward pass, which took a tenth of its CPU seconds in a laptop run.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _LARGE_BYTES)


@contextmanager
def freeze_old_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection, and collect less often.

    Only objects in reference cycles wait for a collection. The process of a flow has a million objects of libraries, and a step's
    games create and free tens of thousands. By default, every second step triggered a full collection, which paused the flow for
    0.15 s or more.
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
    """Private memory of a process, MiB: resident pages without those of files; 0 if it has ended. `family`: include its children.

    How many pages of libraries and mapped shards are resident depends on the page cache, and so on what else the machine did: the
    same imports of torch had 92 MiB of them in one environment and 123 MiB in another.
    """
    try:
        process = psutil.Process(pid)
        members = [process, *(process.children(recursive=True) if family else ())]
        return sum(memory.rss - getattr(memory, "shared", 0) for memory in (each.memory_info() for each in members)) / 2**20
    except psutil.NoSuchProcess:
        return 0.0
