"""Where a thread's time goes: its stack, looked at every few milliseconds while the environment asks for it, and kept as a file.

Promise: without the variable nothing is imported and nothing costs time. A file has every sample with its place in time, so that
those of a step can be told from those of a start.
Never: profile a process that was not asked to.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "ENTENTE_SAMPLES"
"""Environment variable that names the folder which takes the samples."""
INTERVAL_S = 0.002
"""Seconds between two looks."""
Stack = tuple[str, ...]
"""Frames from the outermost to the innermost, each `file:function`; a built-in's file is empty."""
Window = tuple[float, float]
"""A stretch of time, seconds of 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """What one thread did."""

    name: str
    """Whose: flow, engine or trainer."""
    began: float
    """Seconds of 1970."""
    stacks: list[Stack]
    """Different ones."""
    samples: list[tuple[int, float]]
    """(number of a stack, seconds that it stood for), one after the other."""

    def folded(self, windows: Iterable[Window]) -> dict[Stack, float]:
        """Seconds by stack inside of the windows."""
        spans, found, now = list(windows), {}, self.began
        for number, seconds in self.samples:
            inside = sum(max(0.0, min(now + seconds, until) - max(now, since)) for since, until in spans)
            now += seconds
            if inside:
                stack = self.stacks[number]
                found[stack] = found.get(stack, 0.0) + inside
        return found


@contextmanager
def sampled(name: str) -> Iterator[None]:
    """Sample the calling thread for the length of the block, if the environment asks for it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        yield
        return
    from pyinstrument import Profiler

    # Coroutines of one thread take turns: what counts here is what the thread did, not who waited for it.
    profiler = Profiler(interval=INTERVAL_S, async_mode="disabled")
    began = time.time()
    profiler.start()
    try:
        yield
    finally:
        _write(Path(folder), name, began, profiler.stop().frame_records)


def _write(folder: Path, name: str, began: float, records: Iterable[tuple[list[str], float]]) -> None:
    numbers: dict[Stack, int] = {}
    samples = [(numbers.setdefault(_stack(frames), len(numbers)), round(seconds, 6)) for frames, seconds in records]
    kept = {"name": name, "began": began, "stacks": list(numbers), "samples": samples}
    file = folder / f"{name}-{os.getpid()}-{threading.get_ident()}-{secrets.token_hex(2)}.json"
    file.write_text(json.dumps(kept))


def _stack(frames: list[str]) -> Stack:
    """pyinstrument's frames, `function NUL file NUL line ...`, without the thread's own and without lines."""
    told = (frame.split("\0") for frame in frames)
    parts = ((part[1], part[0]) for part in told if len(part) > 1 and part[1] != "<thread>")
    return tuple(f"{'' if file == '<built-in>' else file}:{function}" for file, function in parts)


def read_samples(folder: Path) -> list[Samples]:
    """What the threads of a run left in `folder`, by name."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return [
        Samples(
            name=kept["name"],
            began=kept["began"],
            stacks=[tuple(stack) for stack in kept["stacks"]],
            samples=[(number, seconds) for number, seconds in kept["samples"]],
        )
        for kept in found
    ]
