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
_YOUNG = 50_000
"""New objects between two collections of the youngest; a laptop step's games are about as many."""


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
def freeze_old_objects() -> Iterator[None]:
    """Inside, what exists at the beginning is looked at by no garbage collection, for it is there to stay; and collections come
    when some ten thousand objects are new instead of some hundred.

    Only objects in cycles wait for a collection; others end as ever. In the process of a flow a million objects are of libraries,
    and the games of a step are tens of thousands that come and go: Python took each step's for growth, and every second step
    stood still for 0.15 s and more while it looked through all that had not changed.
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


def resident_mib(pid: int) -> float:
    """Resident memory of a process, MiB; 0 once it is gone."""
    try:
        return psutil.Process(pid).memory_info().rss / 2**20
    except psutil.NoSuchProcess:
        return 0.0
