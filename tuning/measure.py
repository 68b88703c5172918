"""Measures passes of an engine over all requests, with a number of requests in flight or a rate of arrivals.

Each pass starts with an empty prefix cache.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from inference.engine import Engine, EngineWithPrefixes
from records.generation import GenerationRequest
from tuning.figures import Pass

WARM_UP = 16
"""Requests before the first measured pass."""


class Gaps:
    """A logger of vLLM that collects the times between tokens."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """vLLM calls this after each step."""
        if iteration_stats is not None:
            self.milliseconds += [1e3 * gap for gap in iteration_stats.inter_token_latencies_iter]

    def log(self) -> None:
        """Part of vLLM's interface; logs nothing."""

    def log_engine_initialized(self) -> None:
        """Part of vLLM's interface; logs nothing."""

    def record_sleep_state(self, *_: Any) -> None:
        """Part of vLLM's interface; does nothing."""

    def take(self) -> list[float]:
        """The times since the last call."""
        taken, self.milliseconds = self.milliseconds, []
        return taken


def listen(engine: Engine) -> Gaps:
    """Collect the times between tokens of `engine`; an engine other than vLLM reports none."""
    gaps = Gaps()
    manager = getattr(getattr(engine, "_engine", None), "logger_manager", None)
    if manager is not None:
        manager.stat_loggers.append(gaps)
    return gaps


async def forget_prefixes(engine: Engine) -> None:
    """Empty the prefix cache, if the engine has one."""
    if isinstance(engine, EngineWithPrefixes):
        await engine.forget_prefixes()


async def one_pass(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    gaps: Gaps,
    *,
    label: str,
    version: int,
    concurrency: int = 0,
    request_rate: float = 0.0,
    seed: int = 0,
) -> Pass:
    """Draw all requests under `version` and measure their times.

    Args:
        label: prefix of the request ids of this pass.
        concurrency: requests in flight; 0: no limit.
        request_rate: requests that arrive each second, at random moments; 0: all at once.
    """
    await forget_prefixes(engine)
    gaps.take()
    found, limit = Pass(), asyncio.Semaphore(concurrency or len(requests))
    dice = random.Random(f"arrivals {seed}")

    async def ask(number: int, request: GenerationRequest, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        async with limit:
            began = time.perf_counter()
            drawn = await engine.generate(replace(request, request_id=f"{label}/{number}", version=version))
            found.e2el_ms.append(1e3 * (time.perf_counter() - began))
        tokens = len(drawn.token_ids)
        found.ttft_ms.append(drawn.cost.queue_ms + drawn.cost.prefill_ms)
        if tokens > 1:
            found.tpot_ms.append(drawn.cost.decode_ms / (tokens - 1))
        found.prompt_tokens += len(request.prompt_ids)
        found.cached_tokens += drawn.cost.cached_tokens
        found.completion_tokens += tokens

    delays, moment = [], 0.0
    for _ in requests:
        delays.append(moment)
        moment += dice.expovariate(request_rate) if request_rate else 0.0
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask(number, each, delays[number]) for number, each in enumerate(requests)))
    found.seconds, found.cpu_s = time.perf_counter() - began, time.process_time() - cpu
    found.itl_ms = gaps.take()
    return found


async def both_arms(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    publish: Any,
    *,
    interleaved: bool,
    rounds: int,
    load: dict[str, Any],
    on_pass: Any,
) -> dict[str, list[Pass]]:
    """Measure passes without and with the adapter: in turn if both can be served at once, else first all without it.

    Args:
        publish: coroutine function that publishes the adapter as version 1.
        on_pass: called after each pass with the arm and the number of passes done.
    """
    gaps = listen(engine)
    found: dict[str, list[Pass]] = {"off": [], "on": []}
    order = [arm for turn in range(rounds) for arm in (("off", "on") if turn % 2 == 0 else ("on", "off"))]
    if not interleaved:
        order = ["off"] * rounds + ["on"] * rounds
    warm: set[str] = set()
    for arm in order:
        if (arm == "on" or interleaved) and "on" not in warm:
            await publish()
        for each in ("off", "on") if interleaved else (arm,):
            if each not in warm:
                warm.add(each)
                few = requests[:WARM_UP]
                await one_pass(engine, few, gaps, label=f"warm-up/{each}", version=int(each == "on"), concurrency=len(few))
        number = len(found[arm])
        found[arm].append(await one_pass(engine, requests, gaps, label=f"{arm}/{number}", version=int(arm == "on"), **load))
        on_pass(arm, sum(map(len, found.values())))
    return found
