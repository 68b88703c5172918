"""`e2e`: the steps of the whole loop beside those of the old way, and scores after equal seconds and after equal steps.

The new way is the command `entente train` with the settings of the preset. The old way (`benchmarks/old_way`) is a process with
its trainer in a second one. Start groups, forks, powers, horizon, seed and objective are equal: the old way computes a divergence
from the base only if the settings do. Ratios are by trained decisions (`speedup`) and by start groups (`speedup_start_groups`).
The two take turns. The first step of each warms up and is not counted.

Scores are those of the first round, on the same held-out positions. The span of equal seconds begins for both at the start of the
first step, so it includes that step: it holds all steps of the new way, and the old way's score is that of its newest version
within it. The base models differ, so each score has the gain over its own base beside it. Times exclude start-up, making models
and scoring.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.entente_run import RunFigures, quantile, run_entente
from benchmarks.laptop_run import cache_of
from benchmarks.old_way.prompts import make_json_model
from benchmarks.old_way.run import newest_within
from benchmarks.outcome import Outcome, Target
from pipeline.run_settings import RunSettings, layered_settings
from pipeline.threads import plan_threads, usable_cores
from rollouts.settings import RolloutSettings
from storage.runs import MODEL_FOLDER
from telemetry.errors import InputError, TrainingError
from telemetry.progress import reporter

TARGETS = {
    "speedup": Target(at_least=15.0),
    "speedup_start_groups": Target(at_least=12.0),
    "score_20_steps": Target(at_least=1.15),
}
_FOLDER = "_bench"
"""Folder beside the runs for the files of the old way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The amount of work to measure."""

    rounds: int
    """Times that each way is measured, in turn."""
    steps: int
    """Steps of the new way in a round; the old way runs for as many seconds, and for some steps at least."""
    score: bool
    """Score both ways in the first round, for which the old way has as many steps too."""


QUICK = Wanted(rounds=1, steps=8, score=False)
FULL = Wanted(rounds=2, steps=20, score=True)


def wanted_of(*, short: bool, rounds: int | None, steps: int | None) -> Wanted:
    """The short or the full amount of work, with other numbers where they are given.

    Raises:
        InputError: there are fewer than one round or three steps.
    """
    given = {name: value for name, value in {"rounds": rounds, "steps": steps}.items() if value is not None}
    wanted = replace(QUICK if short else FULL, **given)
    if wanted.rounds < 1 or wanted.steps < 3:
        raise InputError(f"{wanted.rounds} rounds of {wanted.steps} steps measure nothing: at least 1 round of 3 steps.")
    return wanted


def bench_e2e(settings: RunSettings, *, wanted: Wanted, arguments: Sequence[str]) -> Outcome:
    """Measure both ways.

    Args:
        arguments: arguments of `entente train` that give it `settings`.

    Raises:
        InputError: the settings ask for more threads than there are cores.
        TrainingError: an arm failed.
    """
    threads = threads_of(settings)
    new: list[dict[str, Any]] = []
    old: list[dict[str, Any]] = []
    for number in range(wanted.rounds):
        amount = replace(wanted, score=wanted.score and not number)
        reporter().say(f"e2e round {number + 1} of {wanted.rounds}: the new way, {wanted.steps} steps")
        new.append(_new_way(settings, amount, arguments))
        reporter().say(f"e2e round {number + 1} of {wanted.rounds}: the old way, at least {new[-1]['span_s']:.0f} s")
        old.append(_old_way(settings, amount, new[-1]["span_s"], threads))
    metrics = figures(new, old, settings.rollouts.start_groups)
    if wanted.score:
        metrics |= score_figures(new[0], old[0], wanted.steps)
    return outcome_of(metrics, settings.rollouts, layered_settings("laptop").rollouts, wanted.steps)


def outcome_of(metrics: Mapping[str, float], rollouts: RolloutSettings, preset: RolloutSettings, steps: int) -> Outcome:
    """The outcome. Where settings of the rollouts differ from the preset's, its name says so and it has no targets."""
    own, usual = rollouts.model_dump(mode="json"), preset.model_dump(mode="json")
    others = {name: value for name, value in own.items() if value != usual[name]}
    targets = {} if others else {name: target for name, target in TARGETS.items() if name in metrics}
    return Outcome(
        benchmark=", ".join(["e2e", *(f"{name} {value}" for name, value in others.items())]),
        metrics=metrics,
        targets=targets,
        scaled_down=tuple(targets) if steps < FULL.steps else (),
    )


# -- the arms --------------------------------------------------------------------------------------------------------------


def _new_way(settings: RunSettings, wanted: Wanted, arguments: Sequence[str]) -> dict[str, Any]:
    positions = settings.evaluation.positions if wanted.score else 2
    name = f"bench-e2e-{os.getpid()}-{time.time_ns()}"
    words = ["--steps", str(wanted.steps), "--seed", str(settings.seed), "--evaluation.positions", str(positions)]
    try:
        return result_of(run_entente([*arguments, *words], settings.runs_root, name))
    finally:
        shutil.rmtree(settings.runs_root / name, ignore_errors=True)


def result_of(run: RunFigures) -> dict[str, Any]:
    """What is compared of a run of the new way; lists leave out the first step, the span does not."""
    times, counts = ("step_s", "train_s", "orchestration_s"), ("train/decisions", "rollout/decisions", "rollout/start_groups")
    return {
        **{name: run.settled(f"time/{name}") for name in times},
        **{name: run.settled(name) for name in counts},
        "span_s": sum(step["time/step_s"] for step in run.steps),
        "cpu_a_step": run.cpu_a_step,
        "lags": run.lags,
        **{name: run.summary[name] for name in ("base_score", "trained_score", "trained_ci")},
    }


def threads_of(settings: RunSettings) -> tuple[int, int]:
    """CPU threads of the old way's (engine, trainer), planned as a run does; the two overlap.

    Raises:
        InputError: more threads are requested than the cores allow.
    """
    engine, trainer = settings.inference.threads, settings.training.threads
    return plan_threads(cores=usable_cores(), engine=engine, trainer=trainer, overlap=True)


def _old_way(settings: RunSettings, wanted: Wanted, span_s: float, threads: tuple[int, int]) -> dict[str, Any]:
    folder = settings.runs_root / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "settings": settings.model_dump(mode="json"),
        "cache": str(cache_of(settings)),
        "model": str(make_json_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model)),
        "folder": str(folder / "old-way"),
        "budget_s": span_s,
        "scored_step": wanted.steps if wanted.score else 0,
        "trainer_threads": threads[1],
    }
    file = folder / "spec.json"
    file.write_text(json.dumps(spec))
    lines = run_old(file, engine_threads=threads[0])
    scores = next((line for line in lines if "base" in line), {})
    return {"steps": [line for line in lines if "step" in line], **scores}


def run_old(spec_file: Path, *, engine_threads: int) -> list[dict[str, Any]]:
    """Run the old way's program and report its steps; returns the objects that it printed.

    Raises:
        TrainingError: the program failed.
    """
    command = [sys.executable, "-m", "benchmarks.old_way.run", str(spec_file)]
    found: list[dict[str, Any]] = []
    log, environment = spec_file.with_suffix(".log"), os.environ | {"OMP_NUM_THREADS": str(engine_threads)}
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                if "step" in found[-1]:
                    reporter().say("the old way: step {step}, {wall_s:.1f} s".format(**found[-1]))
    if child.returncode:
        last = (log.read_text().strip().splitlines() or ["it printed no error"])[-1]
        raise TrainingError(f"the old way ended with {child.returncode}: {last}; its log is {log}")
    log.unlink()
    return found


# -- figures ---------------------------------------------------------------------------------------------------------------


def figures(new: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]], start_groups: int) -> dict[str, float]:
    """Figures of all rounds; ratios are medians of the rounds' ratios. `start_groups`: those of a step of the old way."""
    rounds = [_round(mine, theirs, start_groups) for mine, theirs in zip(new, old, strict=True)]
    metrics = {name: median(each[name] for each in rounds) for name in rounds[0]}
    lags = [lag for each in new for lag in each["lags"]]
    for name in ("speedup", "speedup_start_groups"):  # the range that the page shows
        metrics |= {f"{name}_lowest": min(each[name] for each in rounds), f"{name}_highest": max(each[name] for each in rounds)}
    return metrics | {
        "old_steps_measured": float(min(len(each["steps"]) - 1 for each in old)),  # of a round
        "policy_lag_p50": quantile(lags, 0.5),
        "policy_lag_p99": quantile(lags, 0.99),
        "policy_lag_max": float(max(lags, default=0)),
    }


def _round(new: Mapping[str, Any], old: Mapping[str, Any], start_groups: int) -> dict[str, float]:
    count, step_s = len(new["step_s"]), mean(new["step_s"])
    trained, groups = mean(new["train/decisions"]), mean(new["rollout/start_groups"])
    theirs = old["steps"][1:]
    old_s, old_cpu_s = sum(step["wall_s"] for step in theirs), sum(step["cpu_s"] for step in theirs)
    # A step of the old way with as many trained decisions, or with as many start groups, as one of the new way.
    by_trained = trained / sum(step["trained"] for step in theirs)
    by_groups = groups / (start_groups * len(theirs))
    return {
        "steps_per_hour": 3600 / step_s,
        "steps_per_hour_old_way": 3600 / (old_s * by_trained),
        "speedup": old_s * by_trained / step_s,
        "speedup_start_groups": old_s * by_groups / step_s,
        "speedup_cpu": old_cpu_s * by_trained / new["cpu_a_step"],
        "speedup_cpu_start_groups": old_cpu_s * by_groups / new["cpu_a_step"],
        "cpu_s_a_step": new["cpu_a_step"],
        "cpu_s_a_step_old_way": old_cpu_s * by_trained,
        "decisions_per_s": sum(new["rollout/decisions"]) / (step_s * count),
        "decisions_a_step": mean(new["rollout/decisions"]),
        "trained_a_step": trained,
        "trained_a_step_old_way": mean(step["trained"] for step in theirs),
        "trainer_idle_share": 1 - mean(new["train_s"]) / step_s,
        "orchestration_share": mean(new["orchestration_s"]) / step_s,
        "old_way_trainer_idle_share": 1 - sum(step["train_s"] for step in theirs) / old_s,
    }


def score_figures(new: Mapping[str, Any], old: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Scores of both ways after the equal span and after `steps` steps, their intervals, and gains over the own base.

    The new way's span ends with its last step, so its two scores are one.
    """
    ours = {"mean": new["trained_score"], "ci": new["trained_ci"]}
    found = {"score_base": new["base_score"], "score_base_old_way": old["base"]["mean"]}
    for name, theirs in (("equal_span", old["span"]), (f"{steps}_steps", old["steps_scored"])):
        for suffix, score in (("", ours), ("_old_way", theirs)):
            found[f"score_{name}{suffix}"] = score["mean"]
            found[f"score_gain_{name}{suffix}"] = score["mean"] - found[f"score_base{suffix}"]
            if score["ci"] is not None:  # with too few source games there is no interval
                found[f"score_{name}{suffix}_low"], found[f"score_{name}{suffix}_high"] = score["ci"]
    ended = [(step["ended_s"], step["step"]) for step in old["steps"]]
    return found | {"span_s": new["span_s"], "old_steps_in_span": float(newest_within(new["span_s"], ended) or 0)}
