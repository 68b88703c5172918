"""Passes over an engine: so many requests in flight, or arriving at a rate, and the moments of each.

Each pass begins with an empty prefix cache, so what it finds there is what its own requests left.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

from inference.engine import Engine
from records.generation import GenerationRequest
from tuning.figures import Pass

WARM_UP = 16
"""Requests asked before anything counts."""


class Gaps:
    """Hears from vLLM how far apart tokens come; put among its loggers."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """What vLLM calls after each step."""
        if iteration_stats is not None:
            self.milliseconds += [1e3 * gap for gap in iteration_stats.inter_token_latencies_iter]

    def log(self) -> None:
        """vLLM's beat; nothing is said."""

    def log_engine_initialized(self) -> None:
        """Nothing is said."""

    def record_sleep_state(self, *_: Any) -> None:
        """Nothing sleeps here."""

    def take(self) -> list[float]:
        """What was heard since the last call."""
        heard, self.milliseconds = self.milliseconds, []
        return heard


def listen(engine: Engine) -> Gaps:
    """Gaps between tokens of `engine` from now on; none are heard from an engine other than vLLM."""
    gaps = Gaps()
    manager = getattr(getattr(engine, "_engine", None), "logger_manager", None)
    if manager is not None:
        manager.stat_loggers.append(gaps)
    return gaps


async def forget_prefixes(engine: Engine) -> None:
    """Empty the prefix cache, where the engine keeps one from request to request."""
    from inference.vllm_engine import VllmEngine

    if isinstance(engine, VllmEngine):
        await engine._call("reset_prefix_cache")


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
    """Ask all requests under `version`, and take their times.

    Args:
        label: tells the names of this pass's requests from others'.
        concurrency: requests kept in flight; or
        request_rate: requests that arrive each second, at random moments.
    """
    await forget_prefixes(engine)
    gaps.take()
    found, room = Pass(), asyncio.Semaphore(concurrency or len(requests))
    dice = random.Random(f"arrivals {seed}")

    async def ask(number: int, request: GenerationRequest, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        async with room:
            began = time.perf_counter()
            drawn = await engine.generate(
                GenerationRequest(
                    request_id=f"{label}/{number}",
                    prompt_ids=request.prompt_ids,
                    table=request.table,
                    seed=request.seed,
                    snapshot_id=request.snapshot_id,
                    version=version,
                )
            )
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
    """Passes without the adapter and with it: in turn where both are served at once, else first all without.

    Args:
        publish: coroutine function that makes version 1 of the adapter.
        on_pass: called with each arm's name and the passes done.
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
