"""A completion depends on its request's seed: the same in another order and alone, and another one for another seed."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from records.generation import Generation
from smoke.engines import SCORED, draw, engine_settings, make_requests, relabelled, running
from smoke.job import Found, Job, StageFailed
from smoke.models import model_folder

ALONE = 4
"""Requests that are also drawn alone."""
LEAST = {"float32": 1.0, "bfloat16": 0.5}
"""Share that must be the same if the same batch is drawn twice. In bfloat16 a sum in another order rounds differently."""


def run(job: Job) -> Found:
    """Shares of equal completions."""
    return asyncio.run(_measure(job))


async def _measure(job: Job) -> Found:
    model = model_folder(job)
    requests = make_requests(model, SCORED, "seeds")
    async with running(engine_settings(job, model)) as engine:
        first = await draw(engine, requests)
        again = await draw(engine, relabelled(requests, "again"))
        backwards = (await draw(engine, relabelled(requests, "backwards")[::-1]))[::-1]
        alone = [await engine.generate(each) for each in relabelled(requests[:ALONE], "alone")]
        other = await draw(engine, [replace(each, seed=each.seed + 10_000) for each in relabelled(requests, "other")])
    figures = {
        "again_share": same_share(first, again),
        "backwards_share": same_share(first, backwards),
        "alone_share": same_share(first[:ALONE], alone),
        "other_seed_share": same_share(first, other),
    }
    shown = ", ".join(f"{name.replace('_share', '').replace('_', ' ')} {share:.0%}" for name, share in figures.items())
    repeated = ("again_share", "backwards_share", "alone_share") if job.dtype == "float32" else ("again_share",)
    if min(figures[name] for name in repeated) < LEAST[job.dtype]:
        raise StageFailed(f"the same seeds gave other completions (share that is the same: {shown})", figures=figures)
    if figures["other_seed_share"] > 0.9:
        raise StageFailed(f"other seeds gave the same completions (share that is the same: {shown})", figures=figures)
    return Found(sentence=f"share of completions that is the same: {shown}", figures=figures)


def same_share(one: Sequence[Generation], other: Sequence[Generation]) -> float:
    """Share of the pairs with equal token ids."""
    return sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(one, other, strict=True)) / len(one)
