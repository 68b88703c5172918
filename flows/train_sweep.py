"""Flow: train the runs of a sweep one after another in this process.

Each run is a subflow `train-policy`, so Prefect's pages show one sweep with its runs below it, which have the tag `sweep:<name>`.
State caches and made models lie under the folder of runs, so equal ones are made once. The first run of each base question
measures the base; the others copy it. Everything that must survive is in the sweep's file and the runs' files.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

from prefect import flow, tags
from prefect.runtime import flow_run

from evaluation.score_files import read_scores, write_score
from flows.given_parameters import check_given, check_inside, named_after
from flows.open_run import check_inputs
from flows.train_policy import train_policy
from pipeline.cancel_on_sigterm import cancelled_by_sigterm
from pipeline.run_settings import RunSettings
from pipeline.sweep import SWEEP_FOLDER, Sweep, SweepState, base_question, result_rows, score_of, sweep_results
from pipeline.work_record import record_work
from records.policy_version import BASE_VERSION
from storage.files import held
from storage.runs import RunPaths
from tasks.artifacts import show_table
from telemetry.errors import InputError, TrainingError
from telemetry.progress import reporter


@flow(name="train-sweep", flow_run_name=named_after("sweep", "sweep", "name"))
async def train_sweep(sweep: Sweep, runs_root: Path = Path("runs"), resume: bool = False) -> dict[str, Any]:
    """Train the sweep's runs, and return its result: for each setting the scores over seeds, and what it gains over the first.

    Args:
        sweep: Its settings, seeds and search.
        runs_root: Folder of all runs.
        resume: Continue the sweep of this name from its files; runs that had failed are tried again.

    Raises:
        InputError: the sweep cannot be, its name is taken, it was begun otherwise, or another process trains it.
        TrainingError: the training of a run failed. All others are done.
    """
    check_given(runs_root, runs=[sweep.name])
    for file in sweep.config:
        check_inside(Path(file), runs_root / SWEEP_FOLDER, "config")
    os.environ["WANDB_RUN_GROUP"] = sweep.name  # W&B shows the runs of one group together
    with cancelled_by_sigterm():
        state = await asyncio.to_thread(SweepState, sweep, runs_root)
        if not resume:
            await asyncio.to_thread(check_sweep, state)
        with held(state.lock) as mine, tags(f"sweep:{sweep.name}"):
            if not mine:
                raise InputError(f"sweep '{sweep.name}' is being trained by another process: wait for it, or stop it")
            await asyncio.to_thread(state.resume if resume else state.begin)
            while (left := state.left) or state.draw_next():
                for run in left:
                    check_given(runs_root, settings=run)
                    await _train(state, run)
        results = sweep_results(state)
        await show_table(f"sweep-{sweep.name}", f"{sweep.name}: what its settings were worth", result_rows(results))
    if state.failed:
        said = "; ".join(f"run {name} failed: {why}" for name, why in state.failed.items())
        raise TrainingError(f"{len(state.failed)} of {len(state.runs)} runs failed; --resume tries them again ({said})")
    return {"sweep": sweep.name, "settings": results}


def check_sweep(state: SweepState) -> None:
    """Check what can be checked of a new sweep before anything is trained.

    Raises:
        InputError: see `SweepState.check_new`, `check_inputs` and `check_given`.
    """
    state.check_new()
    for run in state.tried:
        check_given(state.runs_root, settings=run)
        check_inputs(run)


async def _train(state: SweepState, run: RunSettings) -> None:
    reporter().say(f"run {run.run}: {state.describe(run)}")
    if flow_run.id is not None:  # recovery finds the process and its run by this
        await asyncio.to_thread(record_work, run.paths, flow_run.id)
    for other in state.runs:
        if base_question(other) == base_question(run) and score_of(other) is not None:
            await asyncio.to_thread(share_base_scores, other.paths, run.paths)
            break
    try:
        await train_policy(run, resume=run.paths.settings.exists())
    except TrainingError as error:
        reporter().say(f"run {run.run} failed, the sweep goes on: {error}")
        state.failed[run.run] = str(error)


def share_base_scores(source: RunPaths, target: RunPaths) -> None:
    """Copy the scores of the base and of scripted players, which training cannot change, so that they are measured once."""
    there = read_scores(target)
    for label, record in read_scores(source).items():
        if record.policy_version == BASE_VERSION and label not in there:
            write_score(target, record)
