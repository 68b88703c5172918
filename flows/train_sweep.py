"""Trains the runs of a sweep one after another in this process.

Each run is a flow run of `train-policy` with the tag `sweep:<name>` on Prefect's pages. The runs share Python, torch, the Prefect
server and, where their settings of inference are equal, the engine (`flows/kept_engine.py`). State caches and made models lie
under the folder of runs, so equal ones are made once. The first run of each base question measures the base; the others copy it.
"""

import asyncio

from prefect import tags

from flows.kept_engine import keep_engine
from flows.train_policy import train_policy
from pipeline.sweep import SweepRun, SweepState, share_base_scores
from storage.files import FILES
from storage.runs import held
from telemetry.errors import InputError, TrainingError
from telemetry.progress import reporter


async def train_sweep(state: SweepState) -> None:
    """Train every run that is due. A run whose training fails is noted, and the others go on.

    Raises:
        InputError: another process trains this sweep, or a run was refused.
    """
    name = state.sweep.name
    with held(state.file.with_name(f".{name}.lock")) as mine, tags(f"sweep:{name}"):
        if not mine:
            raise InputError(f"sweep '{name}' is being trained by another process: wait for it, or stop it")
        async with keep_engine():
            while due := state.due():
                for run, steps in due:
                    await _train(state, run, steps)


async def _train(state: SweepState, run: SweepRun, steps: int) -> None:
    settings = run.settings.model_copy(update={"steps": steps})
    differs = ", ".join(f"{setting} {value}" for setting, value in state.sweep.points[run.point].items())
    reporter().say(f"run {run.name} to step {steps}: seed {settings.seed}, {differs}")
    measured = [each for each in state.runs if state.scores[each.name] and each.base_question == run.base_question]
    if measured:
        await asyncio.to_thread(share_base_scores, measured[0].settings.paths, settings.paths)
    try:
        summary = await train_policy(settings, resume=FILES.exists(settings.paths.settings))
    except TrainingError as error:
        reporter().say(f"run {run.name} failed, the sweep goes on: {error}")
        state.fail(run, str(error))
    else:
        state.done(run, summary["trained_score"])
