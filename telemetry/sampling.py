"""Samples the stacks of threads with pyinstrument if an environment variable is set.

Without the variable nothing is imported and nothing costs time. A thread's file has every sample with its place in time, so that
samples of a step can be told from those of a start.
"""

import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyinstrument.session import Session

VARIABLE = "ENTENTE_SAMPLES"
"""Environment variable that names the folder for the samples."""
INTERVAL_S = 0.002
"""Seconds between two samples."""
Stack = tuple[str, ...]
"""Frames from the outermost to the innermost, each `file:function`. The file of a built-in function is empty."""
Window = tuple[float, float]
"""Begin and end, in seconds since 1970."""


@contextmanager
def sampled(name: str) -> Iterator[None]:
    """Sample the calling thread for the length of the block, if the environment asks for it.

    Args:
        name: of the thread: flow, engine or trainer. Without a hyphen.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        yield
        return
    from pyinstrument import Profiler

    # Sample the thread, not the current coroutine: coroutines of one thread take turns.
    profiler = Profiler(interval=INTERVAL_S, async_mode="disabled")
    profiler.start()
    try:
        yield
    finally:
        file = f"{name}-{os.getpid()}-{threading.get_ident()}-{secrets.token_hex(2)}.json"
        profiler.stop().save(Path(folder) / file)


def read_samples(folder: Path, windows: Iterable[Window]) -> dict[str, "Session"]:
    """The samples that the threads of a run took inside `windows`, by the thread's name. Threads of one name are put together."""
    from pyinstrument.session import Session

    spans, found = list(windows), dict[str, Session]()
    for file in sorted(folder.glob("*.json")):
        name, whole = file.stem.partition("-")[0], json.loads(file.read_text())
        records, now = [], whole["start_time"]
        for frames, seconds in whole["frame_records"]:
            inside = sum(max(0.0, min(now + seconds, end) - max(now, start)) for start, end in spans)
            now += seconds
            if inside:
                records.append((frames, inside))
        if not records:
            continue
        duration = sum(seconds for _, seconds in records)
        session = Session.from_json(
            whole | {"frame_records": records, "duration": duration, "sample_count": len(records), "target_description": name}
        )
        found[name] = Session.combine(found[name], session) if name in found else session
    return found


def seconds_by_stack(session: "Session") -> dict[Stack, float]:
    """Seconds of each different stack."""
    found: dict[Stack, float] = {}
    for frames, seconds in session.frame_records:
        stack = _stack(frames)
        found[stack] = found.get(stack, 0.0) + seconds
    return found


def _stack(frames: list[str]) -> Stack:
    """pyinstrument's frames, `function NUL file NUL line ...`, without the thread's own frame and without line numbers."""
    parts = (frame.split("\0") for frame in frames)
    named = ((part[1], part[0]) for part in parts if len(part) > 1 and part[1] != "<thread>")
    return tuple(f"{'' if file == '<built-in>' else file}:{function}" for file, function in named)
