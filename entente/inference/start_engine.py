"""Starts an engine on its thread within a time limit, and says now and then that it is still starting.

A first start on a card compiles the model and records CUDA graphs, which takes minutes and looks like a standstill.
"""

import asyncio
import time

from entente.inference.engine import Engine
from entente.inference.host import EngineHost
from entente.inference.server_arguments import compiles, start_limit_s
from entente.inference.settings import InferenceSettings
from entente.telemetry.errors import EngineError
from entente.telemetry.progress import reporter

_SAY_EVERY_S = 60.0


async def start_engine(
    host: EngineHost, engine: Engine, settings: InferenceSettings, *, say_every_s: float = _SAY_EVERY_S
) -> None:
    """Start `engine` on `host`.

    A start that takes too long, or whose caller is cancelled, is cancelled. Then this waits until the host's thread is free,
    because torch's loading cannot be cut short.

    Raises:
        EngineError: it did not start, or not in time.
    """
    limit, began = start_limit_s(settings), time.monotonic()
    start = asyncio.ensure_future(host.run(engine.start()))
    doing = "the model is compiled and CUDA graphs are recorded" if compiles(settings) else "the model is loaded"
    if settings.urls:
        doing = "servers are not ready"
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
            await host.run(asyncio.sleep(0))
