"""Trains the runs of a sweep one after another in this process, each as a flow run of `train-policy` tagged `sweep:<name>`.

Runs share equal state caches and models under the folder of runs. The first run with each `base_question` measures the base;
the others copy its scores.
"""

import asyncio
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from prefect import tags

from entente.evaluation.score_files import read_scores, write_score
from entente.records.policy_version import BASE_VERSION
from entente.settings.find_model import model_folder
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import EngineError, TrainingError
from entente.telemetry.progress import reporter
from flows.open_run import check_inputs
from flows.sweep import base_question, check_name_of_sweep, score_of
from flows.train_policy import train_policy
from storage.run_base import check_base
from storage.runs import RunPaths


async def train_sweep(name: str, runs: Sequence[RunSettings], *, resume: bool, varied: Collection[str] = ()) -> None:
    """Train the runs of a sweep that are not done; `resume` continues existing ones, including failed ones. `varied`: names of
    the settings in which they differ.

    Raises:
        InputError: a run cannot be trained, exists without `resume`, or has other settings or another base model.
        TrainingError: the rollouts or the training of a run failed; all others are done.
    """
    for run in runs:
        check_name_of_sweep(run, name, resume=resume, varied=varied)
        check_inputs(run, resume=resume and run.paths.settings.exists())
        if (model := model_folder(run, run.runs_root)) is not None:
            check_base(run.paths, model)  # also of a run that is done: the others would be compared with it
    failed: dict[str, str] = {}
    with tags(f"sweep:{name}"), _wandb_group(name):
        for run in runs:
            if score_of(run) is None and (why := await _train(run, runs)):
                failed[run.run] = why
    if failed:
        reasons = "; ".join(f"run {name} failed: {why}" for name, why in failed.items())
        raise TrainingError(f"{len(failed)} of {len(runs)} runs failed; --resume retries them ({reasons})")


@contextmanager
def _wandb_group(name: str) -> Iterator[None]:
    """Within the block W&B shows the runs together as group `name`, unless the user has set a group."""
    if os.environ.get("WANDB_RUN_GROUP"):
        yield
        return
    os.environ["WANDB_RUN_GROUP"] = name
    try:
        yield
    finally:
        del os.environ["WANDB_RUN_GROUP"]


async def _train(run: RunSettings, runs: Sequence[RunSettings]) -> str:
    reporter().say(f"run {run.run}: seed {run.seed}")
    for other in runs:
        if base_question(other) == base_question(run) and score_of(other) is not None:
            await asyncio.to_thread(share_base_scores, other.paths, run.paths)
            break
    try:
        await train_policy(run, resume=run.paths.settings.exists())
    except (EngineError, TrainingError) as error:
        reporter().say(f"run {run.run} failed, the sweep continues: {error}")
        return str(error)
    return ""


def share_base_scores(source: RunPaths, target: RunPaths) -> None:
    """Copy the scores of the base and of scripted players, which do not depend on training."""
    there = read_scores(target)
    for label, record in read_scores(source).items():
        if record.policy_version == BASE_VERSION and label not in there:
            write_score(target, record)
