"""Draws the same requests with forced tokens appended (the jump) and drawn one by one; which way is faster?"""

import asyncio

from records.generation import Generation
from smoke.engines import COMPARED, SCORED, draw, engine_settings, illegal, kind_of, make_requests, rate, relabelled, running
from smoke.job import Found, Job, StageFailed
from smoke.models import model_folder
from telemetry.errors import EngineError, EngineLostError

SAME_SHARE = 0.95
"""In float32, completions that must be the same both ways: rounding may move a draw that lies at the edge of two tokens."""


def run(job: Job) -> Found:
    """Rates of both ways, and the share of equal completions."""
    return asyncio.run(_measure(job))


async def _measure(job: Job) -> Found:
    model = model_folder(job)
    settings = engine_settings(job, model)
    if kind_of(settings) == "torch":
        return Found(sentence="the torch engine always computes forced tokens together with the drawn one before them")
    in_flight = COMPARED[job.device]
    requests = make_requests(model, 8 + 4 * in_flight, "jump")
    figures: dict[str, float] = {}
    drawn: dict[str, list[Generation]] = {}
    for way in ("off", "on"):
        try:
            async with running(settings.model_copy(update={"jump_forced": way})) as engine:
                drawn[way] = await draw(engine, relabelled(requests[:SCORED], way))
                figures[f"{way}.decisions_per_s"] = await rate(engine, requests, f"rate-{way}", 1, in_flight)
        except EngineError as error:
            if way == "off" or isinstance(error, EngineLostError):
                raise
            return Found(sentence="forced tokens are drawn one by one", figures=figures, notes=[f"no jump here: {error}"])
    wrong = {way: illegal(list(zip(requests, found, strict=False))) for way, found in drawn.items()}
    if any(wrong.values()):
        raise StageFailed(f"illegal completions: {wrong['off']} without the jump, {wrong['on']} with it", figures=figures)
    pairs = list(zip(drawn["off"], drawn["on"], strict=True))
    figures["same_share"] = sum(one.token_ids.tolist() == other.token_ids.tolist() for one, other in pairs) / len(pairs)
    if job.dtype == "float32" and figures["same_share"] < SAME_SHARE:
        raise StageFailed(f"only {figures['same_share']:.0%} of the completions are the same with the jump", figures=figures)
    gain = figures["on.decisions_per_s"] / figures["off.decisions_per_s"]
    return Found(
        sentence=f"with the jump {gain:.2f} times the decisions a second; {figures['same_share']:.0%} of completions are equal",
        figures=figures | {"gain": gain},
    )
