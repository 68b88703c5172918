"""Starts the engine that a run would choose, and measures decisions a second by requests in flight and the time of a swap."""

import asyncio
import time
from statistics import median

from smoke.engines import BATCHES, COMPARED, engine_settings, kind_of, make_requests, rate, relabelled, running
from smoke.job import Found, Job
from smoke.models import model_folder, random_policy

VERSIONS = 4
"""Policy versions that are published; the first warms up."""


def run(job: Job) -> Found:
    """Rates of the base model, then of an adapter."""
    return asyncio.run(_measure(job))


async def _measure(job: Job) -> Found:
    model = model_folder(job)
    settings, batches = engine_settings(job, model), BATCHES[job.device]
    requests = make_requests(model, 8 + 4 * batches[-1], "rate")
    began = time.perf_counter()
    async with running(settings) as engine:
        figures = {"start_s": time.perf_counter() - began}
        for batch in batches:
            figures[f"decisions_per_s.{batch}"] = await rate(engine, requests, f"base-{batch}", 1 + batches.index(batch), batch)
        swaps = []
        for version, request in enumerate(relabelled(requests[:VERSIONS], "swap"), 1):
            began = time.perf_counter()
            await engine.publish(random_policy(job, model, version))
            await engine.generate(request)
            swaps.append(1e3 * (time.perf_counter() - began))
        figures["swap_ms"] = median(swaps[1:])
        figures["adapter.decisions_per_s"] = await rate(engine, requests, "adapter", 1 + len(batches), COMPARED[job.device])
        mode = getattr(engine, "adapters", "slots")
    most = max(batches, key=lambda batch: figures[f"decisions_per_s.{batch}"])
    return Found(
        sentence=f"{kind_of(settings)} with {mode} is ready after {figures['start_s']:.1f} s and draws "
        f"{figures[f'decisions_per_s.{most}']:.0f} decisions/s with {most} in flight; a new version is drawn from after "
        f"{figures['swap_ms']:.0f} ms",
        figures=figures,
    )
