"""Starts an engine on its thread within a time limit, and says now and then that it is still starting.

A first start on a card compiles the model and records CUDA graphs, which takes minutes and looks like a standstill.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Set
from contextlib import suppress
from multiprocessing.process import BaseProcess

import psutil

from inference.engine import Engine
from inference.engine_cards import computes_on_card, engine_family
from inference.host import EngineHost
from inference.settings import InferenceSettings
from telemetry.errors import EngineError
from telemetry.progress import reporter

START_S = 300.0
"""Time limit where nothing is compiled, seconds."""
COMPILING_START_S = 1800.0
"""Time limit where vLLM compiles and records CUDA graphs, seconds. Unmeasured; six times as long as for loading alone."""
_SAY_EVERY_S = 60.0
_KILL_EVERY_S = 0.5


def start_limit_s(settings: InferenceSettings) -> float:
    """Seconds within which an engine of these settings must be ready."""
    return COMPILING_START_S if compiles(settings) else START_S


def compiles(settings: InferenceSettings) -> bool:
    """Whether the engine compiles at its start. Of servers elsewhere it is assumed, unless the settings say otherwise."""
    if settings.enforce_eager != "auto":
        return settings.enforce_eager == "off"
    return bool(settings.urls) or (engine_family(settings) == "vllm" and computes_on_card(settings))


async def start_engine(
    host: EngineHost, engine: Engine, settings: InferenceSettings, *, say_every_s: float = _SAY_EVERY_S
) -> None:
    """Start `engine` on `host`.

    After the limit, or if the caller is cancelled, the processes that the start makes are ended. That ends a start of vLLM with a
    core in a process of its own, which blocks the host's thread. A start inside this process cannot be ended: this waits for it.

    Raises:
        EngineError: it did not start, or not in time.
    """
    limit, before, began = start_limit_s(settings), set(multiprocessing.active_children()), time.monotonic()
    start = asyncio.ensure_future(host.run(engine.start()))
    doing = "vLLM loads the model, compiles it and records CUDA graphs" if compiles(settings) else "the model is loaded"
    if settings.urls:
        doing = "vLLM servers are not ready"
    try:
        while not start.done():
            passed = time.monotonic() - began
            if passed >= limit:
                raise EngineError(
                    f"the engine did not start within {limit:g} s"
                    + (": set inference.enforce_eager to 'on', which compiles nothing" if compiles(settings) else "")
                )
            if passed >= say_every_s:
                reporter().say(f"the engine is still starting after {passed:.0f} s: {doing}")
            await asyncio.wait({start}, timeout=min(say_every_s, limit - passed))
        start.result()
    finally:
        if not start.done():
            start.cancel()
            await _end_start(host, before)


async def _end_start(host: EngineHost, before: Set[BaseProcess]) -> None:
    """Kill the children that a start makes, also those that it makes from now on, until the host's thread is free."""
    free = asyncio.ensure_future(host.run(asyncio.sleep(0)))
    while not free.done():
        for child in set(multiprocessing.active_children()) - before:
            _kill_tree(child.pid)
        await asyncio.wait({free}, timeout=_KILL_EVERY_S)


def _kill_tree(pid: int | None) -> None:
    """Kill a process and its descendants. They are asked nothing first: vLLM's core takes minutes to end while it waits for its
    workers, and a start has nothing to save.
    """
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
