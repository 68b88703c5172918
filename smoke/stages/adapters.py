"""Serves a policy version as a LoRA slot and as merged weights: both must draw from it, and which way is faster."""

import asyncio
from typing import Literal

from smoke.engines import COMPARED, SCORED, draw, engine_settings, kind_of, make_requests, rate, require_agreement, running
from smoke.job import Found, Job, StageFailed
from smoke.models import model_folder, random_policy
from smoke.oracle import Drawn, Reference
from telemetry.errors import DataError, EngineError, EngineLostError, InputError

Way = Literal["slots", "merge_reload"]


def run(job: Job) -> Found:
    """Rates of both ways. What the product itself refuses, with a reason, is a note."""
    model = model_folder(job)
    settings = engine_settings(job, model)
    ways: tuple[Way, ...] = ("slots",) if kind_of(settings) == "torch" else ("slots", "merge_reload")
    figures: dict[str, float] = {}
    drawn: dict[Way, Drawn] = {}
    notes = []
    for way in ways:
        try:
            drawn[way] = asyncio.run(_draw(job, way, figures))
        except EngineLostError:  # it broke, which is no refusal
            raise
        except (DataError, EngineError, InputError) as error:
            notes.append(f"{way}: {error}")
    if not drawn:
        raise StageFailed("; ".join(notes))
    reference = Reference.load(model, job.device, job.dtype, random_policy(job, model, 1))
    for way, found in drawn.items():
        checked = reference.check(found)
        require_agreement(job, checked)
        figures[f"{way}.gap_mean_nats"] = checked.gap.mean
    shown = " and ".join(f"{figures[f'{way}.decisions_per_s']:.0f} decisions/s with {way}" for way in drawn)
    return Found(sentence=f"{shown}; log-probabilities are those of the adapter", figures=figures, notes=notes)


async def _draw(job: Job, way: Way, figures: dict[str, float]) -> Drawn:
    model = model_folder(job)
    settings = engine_settings(job, model, adapters=way)
    in_flight = COMPARED[job.device]
    requests = make_requests(model, 8 + 4 * in_flight, way)
    async with running(settings) as engine:
        await engine.publish(random_policy(job, model, 1))
        drawn = list(zip(requests[:SCORED], await draw(engine, requests[:SCORED]), strict=True))
        figures[f"{way}.decisions_per_s"] = await rate(engine, requests, f"rate-{way}", 1, in_flight)
    wrong = {generation.policy.version for _, generation in drawn} - {1}
    if wrong:
        raise StageFailed(f"{way} drew with version {min(wrong)} instead of the published one")
    return drawn
