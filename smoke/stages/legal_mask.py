"""Holds every drawn completion against its legal table, and its log-probabilities against a forward of transformers.

The rows are kept for the stages of the trainer.
"""

import asyncio

from smoke.engines import SCORED, draw, engine_settings, make_requests, require_agreement, running
from smoke.job import Found, Job
from smoke.models import model_folder
from smoke.oracle import Drawn, Reference
from smoke.rows import write_rows


def run(job: Job) -> Found:
    """Draw, close the engine, and compare."""
    model = model_folder(job)
    drawn = asyncio.run(_draw(job))
    checked = Reference.load(model, job.device, job.dtype).check(drawn)
    require_agreement(job, checked)
    write_rows(job.drawn, drawn)
    gap = checked.gap
    return Found(
        sentence=f"{len(drawn)} completions are legal; {gap.tokens} branching tokens differ from transformers in "
        f"{checked.dtype} by {gap.mean:.2g} nats on average, {gap.largest:.2g} at most",
        figures={"gap_mean_nats": gap.mean, "gap_p99_nats": gap.p99, "gap_largest_nats": gap.largest, "tokens": gap.tokens},
    )


async def _draw(job: Job) -> Drawn:
    model = model_folder(job)
    requests = make_requests(model, SCORED, "mask")
    async with running(engine_settings(job, model)) as engine:
        return list(zip(requests, await draw(engine, requests), strict=True))
