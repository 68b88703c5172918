"""The memory of a process that works for hours: what it has, what it keeps, and what it gives back."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

GIVE_BACK_STEPS = 10
"""Training steps between two times that freed memory is given back."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`, as its malloc.h numbers them."""
_KEPT_BYTES = 2**30
_LARGE_BYTES = 2**25
"""The largest that glibc takes on every platform."""


def give_back_memory() -> None:
    """Return freed memory to the system. Without it, a process that allocates and frees from several threads keeps ever more
    half-empty pages. Only glibc needs asking; elsewhere this does nothing.

    It takes about a millisecond, but what is allocated next comes page by page from the kernel again: each step of the laptop
    preset took a tenth longer where each gave back its memory. So it is for every tenth, and after work of another kind.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep what is freed from here on, up to a gigabyte, for what is allocated next, until `give_back_memory`. Only glibc can be
    told.

    By itself it returns the end of its heap whenever that is free, and large pieces one by one: a trainer's activations, after
    each backward, to be fetched page by page in the next forward. In a laptop run a tenth of the trainer's CPU seconds were the
    kernel's for that.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_TRIM_THRESHOLD, _KEPT_BYTES)
        option(_MMAP_THRESHOLD, _LARGE_BYTES)


@contextmanager
def what_stands_stays() -> Iterator[None]:
    """Inside, what exists at the beginning is looked at by no garbage collection: it is there to stay.

    Python looks through all old objects each time that new ones have grown by a quarter of them. In the process of a flow a
    million are of libraries, and of games some ten thousand a step, whose boards and powers name each other: every second step
    stood still for 0.15 s and more. Only objects in cycles wait for a collection; others end as ever.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resident_mib(pid: int) -> float:
    """Resident memory of a process, MiB; 0 once it is gone."""
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0
