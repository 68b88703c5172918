"""`e2e`: the steps of the whole loop beside those of the old way.

The new way is the command `entente train` with the settings of the preset. The old way (`benchmarks/old_way`) is a process with
its trainer in a second one. Start groups, forks, powers, horizon, seed and objective are equal: the old way computes a divergence
from the base only if the settings do. Ratios are by trained decisions (`speedup`) and by start groups (`speedup_start_groups`).
The two take turns. The first step of each warms up and is not counted, nor are start-up, making models and scoring. What was
learned is not compared: the two base models differ.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.entente_run import RunFigures, short_run
from benchmarks.laptop_run import cache_of
from benchmarks.old_way.prompts import make_json_model
from benchmarks.outcome import Outcome, Target
from pipeline.run_settings import RunSettings, layered_settings
from pipeline.threads import plan_threads, usable_cores
from rollouts.settings import RolloutSettings
from storage.runs import MODEL_FOLDER
from telemetry.errors import InputError, TrainingError
from telemetry.progress import reporter

TARGETS = {"speedup": Target(at_least=15.0), "speedup_start_groups": Target(at_least=12.0)}
_FOLDER = "_bench"
"""Folder beside the runs for the files of the old way."""


def bench_e2e(settings: RunSettings, *, rounds: int, steps: int, arguments: Sequence[str]) -> Outcome:
    """Measure both ways in turn.

    Args:
        steps: steps of the new way in a round; the old way runs for as many seconds, and for some steps at least.
        arguments: arguments of `entente train` that give it `settings`.

    Raises:
        InputError: there are fewer than one round or three steps, or the settings ask for more threads than there are cores.
        TrainingError: an arm failed.
    """
    if rounds < 1 or steps < 3:
        raise InputError(f"{rounds} rounds of {steps} steps measure nothing: at least 1 round of 3 steps.")
    threads = plan_threads(
        cores=usable_cores(), engine=settings.inference.threads, trainer=settings.training.threads, overlap=True
    )
    pairs = []
    for number in range(1, rounds + 1):
        reporter().say(f"e2e round {number} of {rounds}: the new way, {steps} steps")
        with short_run(settings, arguments, steps) as (ours, _):
            pass
        budget_s = sum(step["time/step_s"] for step in ours.steps)
        reporter().say(f"e2e round {number} of {rounds}: the old way, at least {budget_s:.0f} s")
        pairs.append((ours, _old_way(settings, budget_s, threads)))
    return outcome_of(figures(pairs, settings.rollouts.start_groups), settings.rollouts, layered_settings("laptop").rollouts)


def outcome_of(metrics: Mapping[str, float], rollouts: RolloutSettings, preset: RolloutSettings) -> Outcome:
    """The outcome. Where settings of the rollouts differ from the preset's, its name says so and it has no targets."""
    own, usual = rollouts.model_dump(mode="json"), preset.model_dump(mode="json")
    others = [f"{name} {value}" for name, value in own.items() if value != usual[name]]
    return Outcome(benchmark=", ".join(["e2e", *others]), metrics=metrics, targets={} if others else TARGETS)


def _old_way(settings: RunSettings, budget_s: float, threads: tuple[int, int]) -> list[dict[str, Any]]:
    """The steps of the old way's program.

    Raises:
        TrainingError: the program failed.
    """
    folder = settings.runs_root / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "settings": settings.model_dump(mode="json"),
        "cache": str(cache_of(settings)),
        "model": str(make_json_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model)),
        "folder": str(folder / "old-way"),
        "budget_s": budget_s,
        "trainer_threads": threads[1],
    }
    file = folder / "spec.json"
    file.write_text(json.dumps(spec))
    command, steps = [sys.executable, "-m", "benchmarks.old_way.run", str(file)], []
    log, environment = file.with_suffix(".log"), os.environ | {"OMP_NUM_THREADS": str(threads[0])}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            steps.append(json.loads(line))
            reporter().say("the old way: step {step}, {wall_s:.1f} s".format(**steps[-1]))
    if child.returncode:
        last = (log.read_text().strip().splitlines() or ["it printed no error"])[-1]
        raise TrainingError(f"the old way ended with {child.returncode}: {last}; its log is {log}")
    log.unlink()
    return steps


def figures(pairs: Sequence[tuple[RunFigures, list[dict[str, Any]]]], start_groups: int) -> dict[str, float]:
    """Figures of all rounds; ratios are medians of the rounds' ratios. `start_groups`: those of a step of the old way."""
    rounds = [_round(ours, theirs, start_groups) for ours, theirs in pairs]
    metrics = {name: median(each[name] for each in rounds) for name in rounds[0]}
    for name in TARGETS:  # the range that the page shows
        metrics |= {f"{name}_lowest": min(each[name] for each in rounds), f"{name}_highest": max(each[name] for each in rounds)}
    lags = [lag for ours, _ in pairs for lag in ours.lags]
    steps = min(len(theirs) - 1 for _, theirs in pairs)
    return metrics | {"old_steps_measured": float(steps), "policy_lag_max": float(max(lags, default=0))}


def _round(ours: RunFigures, old: list[dict[str, Any]], start_groups: int) -> dict[str, float]:
    step_s, theirs = mean(ours.settled("time/step_s")), old[1:]
    trained, groups = mean(ours.settled("train/decisions")), mean(ours.settled("rollout/start_groups"))
    old_s, old_cpu_s = sum(step["wall_s"] for step in theirs), sum(step["cpu_s"] for step in theirs)
    # A step of the old way with as many trained decisions, or with as many start groups, as one of the new way.
    by_trained = trained / sum(step["trained"] for step in theirs)
    by_groups = groups / (start_groups * len(theirs))
    return {
        "steps_per_hour": 3600 / step_s,
        "steps_per_hour_old_way": 3600 / (old_s * by_trained),
        "speedup": old_s * by_trained / step_s,
        "speedup_start_groups": old_s * by_groups / step_s,
        "speedup_cpu": old_cpu_s * by_trained / ours.cpu_a_step,
        "speedup_cpu_start_groups": old_cpu_s * by_groups / ours.cpu_a_step,
        "cpu_s_a_step": ours.cpu_a_step,
        "cpu_s_a_step_old_way": old_cpu_s * by_trained,
        "decisions_per_s": mean(ours.settled("rollout/decisions")) / step_s,
        "trained_a_step": trained,
        "trained_a_step_old_way": mean(step["trained"] for step in theirs),
        "trainer_idle_share": 1 - mean(ours.settled("time/train_s")) / step_s,
        "orchestration_share": mean(ours.settled("time/orchestration_s")) / step_s,
        "old_way_trainer_idle_share": 1 - sum(step["train_s"] for step in theirs) / old_s,
    }
