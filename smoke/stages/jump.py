"""Draws the same requests with forced tokens appended (the jump) and drawn one by one: the same policy? Which way is faster?"""

import asyncio

from smoke.engines import COMPARED, SCORED, draw, engine_settings, kind_of, make_requests, rate, require_agreement, running
from smoke.job import Found, Job
from smoke.models import model_folder
from smoke.oracle import Drawn, Reference
from smoke.stages.seeds import same_share
from telemetry.errors import EngineError, EngineLostError


def run(job: Job) -> Found:
    """Rates of both ways; both draw with the probabilities of the reference."""
    model = model_folder(job)
    if kind_of(engine_settings(job, model)) == "torch":
        return Found(sentence="the torch engine always computes forced tokens together with the drawn one before them")
    figures: dict[str, float] = {}
    drawn = {"off": asyncio.run(_draw(job, "off", figures))}
    notes = []
    try:
        drawn["on"] = asyncio.run(_draw(job, "on", figures))
    except EngineLostError:  # it broke, which is no refusal
        raise
    except EngineError as error:
        notes = [f"no jump here: {error}"]
    reference = Reference.load(model, job.device, job.dtype)
    for each in drawn.values():
        require_agreement(job, reference.check(each))
    if notes:
        return Found(sentence="forced tokens are drawn one by one", figures=figures, notes=notes)
    figures["gain"] = figures["on.decisions_per_s"] / figures["off.decisions_per_s"]
    # Equal only if a forced token takes no random number.
    figures["same_share"] = same_share(*([generation for _, generation in drawn[way]] for way in ("off", "on")))
    return Found(
        sentence=f"with the jump {figures['gain']:.2f} times the decisions a second; both ways draw with the reference's "
        f"probabilities, and {figures['same_share']:.0%} of completions are equal",
        figures=figures,
    )


async def _draw(job: Job, way: str, figures: dict[str, float]) -> Drawn:
    model, in_flight = model_folder(job), COMPARED[job.device]
    requests = make_requests(model, 8 + 4 * in_flight, way)
    async with running(engine_settings(job, model, jump_forced=way)) as engine:
        drawn = list(zip(requests[:SCORED], await draw(engine, requests[:SCORED]), strict=True))
        figures[f"{way}.decisions_per_s"] = await rate(engine, requests, f"rate-{way}", 1, in_flight)
    return drawn
