"""The work that `entente bench profile` measures: rollouts alone, the trainer alone, or the whole flow.

It runs the same code as a training run. The first step is a warm-up and is not counted.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evaluation.settings import EvaluationSettings
from flows.open_run import open_run
from flows.train_policy import train_policy
from pipeline.play import play_stretch
from pipeline.resources import Resources
from pipeline.run_settings import RunSettings
from reports.profile import summed
from reports.read_figures import read_figures
from telemetry.progress import reporter
from telemetry.sampling import Window, sampled
from telemetry.sinks import TelemetrySettings
from telemetry.stages import stages_of, trainer_stages_of
from training.messages import TrainedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The measured steps of one profile."""

    stages: dict[str, float]
    """Seconds by stage, summed over the counted steps; empty if they come from the samples alone."""
    windows: list[Window]
    """Begin and end of each counted step."""


def short_run_settings(settings: RunSettings, run: str, steps: int) -> RunSettings:
    """These settings for a run of a few steps, with the shortest scoring and no report."""
    return settings.model_copy(
        update={
            "run": run,
            "steps": steps,
            "telemetry": TelemetrySettings(wandb="disabled", report=False),
            "evaluation": EvaluationSettings(positions=1, powers_per_position=1, bootstrap=100, opponents=("random",)),
        }
    )


async def profile_rollouts(settings: RunSettings) -> Profiled:
    """Play the start groups of each step under the base model, and publish them."""
    windows = []
    async with open_run(settings) as resources:
        for step in range(1, settings.steps + 1):
            window, _ = await _timed(step, settings, lambda step=step: _play(resources, step))
            windows.append(window)
    return Profiled(stages={}, windows=windows[1:])


async def profile_trainer(settings: RunSettings) -> Profiled:
    """Play rows for each step, then train on them; only the trainer's seconds count."""
    windows, stages = [], []
    async with open_run(settings) as resources:
        for step in range(1, settings.steps + 1):
            await _play(resources, step)
            window, trained = await _timed(step, settings, lambda step=step: _train(resources, step))
            await resources.serve(trained.published)
            windows.append(window)
            found = trainer_stages_of(trained.metrics)
            stages.append(found | {"handing over": max(0.0, window[1] - window[0] - sum(found.values()))})
    return Profiled(stages=summed(stages[1:]), windows=windows[1:])


async def profile_flow(settings: RunSettings) -> Profiled:
    """The training flow from its first step to its last."""
    with sampled("flow"):
        await train_policy(settings)
    _, steps = read_figures(settings.paths)
    ends = {step: float(line["time"]) for line in _lines(settings) if (step := line["step"]) in steps}
    counted = [step for step in steps if step > 1]
    return Profiled(
        stages=summed(stages_of(steps[step]) for step in counted),
        windows=[(ends[step] - steps[step]["time/step_s"], ends[step]) for step in counted],
    )


def _lines(settings: RunSettings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in settings.paths.metrics.read_text().splitlines()]


async def _timed(step: int, settings: RunSettings, work: Callable[[], Any]) -> tuple[Window, Any]:
    began = time.time()
    done = await work()
    reporter().stage("steps profiled", step, settings.steps)
    return (began, time.time()), done


async def _play(resources: Resources, step: int) -> None:
    groups = resources.rollouts.start_groups
    await play_stretch(resources, step, (step - 1) * groups, groups)


async def _train(resources: Resources, step: int) -> TrainedStep:
    return await asyncio.to_thread(resources.trainer.step, step, resources.rollouts.start_groups)
