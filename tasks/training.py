"""The trainer's tasks: compare it with the engine, and train a step."""

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from entente.pipeline.resources import Resources
from entente.telemetry.progress import reporter
from entente.training.messages import TrainedStep
from entente.training.step_metrics import mismatch_warning
from storage.lesson_shelf import LessonQuery


async def has_fresh_rows(resources: Resources) -> bool:
    """Whether there is any row of the version that the trainer has loaded."""
    return await asyncio.to_thread(resources.trainer.fresh_rows) > 0


@task(name="check-mismatch", cache_policy=NO_CACHE, persist_result=False)
async def check_mismatch(resources: Resources) -> dict[str, float]:
    """Compare the log-probabilities of trainer and engine on fresh rows. Returns the mismatch as metrics.

    Raises:
        TrainingError: they differ by more than the settings allow.
    """
    with resources.spans.span("train"):
        return await asyncio.to_thread(resources.trainer.measure_mismatch)


@task(
    name="train-step",
    task_run_name="train-step-{step}",
    cache_policy=NO_CACHE,
    persist_result=False,
)
async def train_step(
    resources: Resources, step: int, start_groups: int | None = None, lessons: LessonQuery | None = None
) -> TrainedStep:
    """Train `step` in the trainer's process, which publishes policy version `step`.

    Args:
        start_groups: start groups that it trains on at most; None: as the run's settings say.
        lessons: the lessons that it trains on; None: no lessons.
    """
    groups = resources.rollouts.start_groups if start_groups is None else start_groups
    with resources.spans.span("train"):
        # In a thread, because rollouts run on this event loop meanwhile.
        trained = await asyncio.to_thread(resources.trainer.step, step, groups, lessons)
    if sentence := mismatch_warning(step, trained.metrics):
        reporter().say(sentence)
    return trained
