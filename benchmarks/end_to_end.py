"""`e2e`: steps an hour of the whole loop beside those of the old way, scores after equal time, and the value of each improvement.

The new way is the command `entente train` with the settings of the preset. The old way (`benchmarks/old_way`) is a process with
its trainer in a second one; it has as many start groups, forks and powers, and the same seed. Its steps are scaled to as many
trained decisions as those of the new way. The two take turns. The first step of each warms up and is not counted. Both are scored
on the same held-out positions after the same seconds of training. Times exclude start-up, making models and scoring.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ablation import measure_ablation
from benchmarks.entente_run import RunFigures, quantile, run_entente
from benchmarks.kept_arms import KeptArms
from benchmarks.old_way.arm import Setting
from benchmarks.old_way.run import spec_of
from benchmarks.outcome import Outcome, Target
from evaluation.settings import EvaluationSettings
from telemetry.errors import InputError, TrainingError
from telemetry.progress import reporter

TARGETS = {"speedup": Target(at_least=10.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The amount of work to measure."""

    rounds: int
    """Times that each way is measured, in turn."""
    steps: int
    """Steps of the new way in a round; the old way runs for as many seconds."""
    ablation_steps: int
    """Steps of each arm of the ablation; 0: no ablation."""
    score: bool
    """Score both ways."""


QUICK = Wanted(rounds=1, steps=8, ablation_steps=0, score=False)
FULL = Wanted(rounds=2, steps=20, ablation_steps=2, score=True)


def bench_e2e(
    *,
    wanted: Wanted,
    setting: Setting,
    cache: Path,
    evaluation: EvaluationSettings,
    runs_root: Path,
    arguments: Sequence[str],
    depth: int,
    kept: KeptArms,
) -> Outcome:
    """Measure all arms that `kept` does not hold.

    Args:
        arguments: arguments of `entente train` that give it the settings of `setting`.
        depth: steps of rollouts that the old way has in flight while it trains.

    Raises:
        InputError: there are fewer than one round or three steps.
        TrainingError: an arm failed.
    """
    if wanted.rounds < 1 or wanted.steps < 3:
        raise InputError(f"{wanted.rounds} rounds of {wanted.steps} steps measure nothing: at least 1 round of 3 steps.")
    new, old = [], []
    for number in range(wanted.rounds):
        label = f"{setting.seed}-{wanted.steps}-{number}"
        reporter().say(f"e2e round {number + 1} of {wanted.rounds}: the new way, {wanted.steps} steps")
        new.append(kept.once(f"new-{label}", lambda: _new_way(wanted, setting, evaluation, runs_root, arguments)))
        budget_s = sum(new[-1]["step_s"])
        reporter().say(f"e2e round {number + 1} of {wanted.rounds}: the old way, {budget_s:.0f} s")
        old.append(
            kept.once(
                f"old-{label}-{depth}",
                lambda budget_s=budget_s: _old_way(wanted, setting, cache, evaluation, budget_s, depth),
            )
        )
    metrics = figures(new, old)
    if wanted.ablation_steps:
        metrics |= measure_ablation(
            setting, wanted.ablation_steps, kept, rolled=metrics["decisions_a_step"], trained=metrics["trained_a_step"]
        )
    return Outcome(benchmark="e2e", metrics=metrics, targets=TARGETS)


# -- the arms --------------------------------------------------------------------------------------------------------------


def _new_way(
    wanted: Wanted, setting: Setting, evaluation: EvaluationSettings, runs_root: Path, arguments: Sequence[str]
) -> dict[str, Any]:
    positions = evaluation.positions if wanted.score else 2
    name = f"bench-e2e-{os.getpid()}-{time.time_ns()}"
    words = ["--steps", str(wanted.steps), "--seed", str(setting.seed), "--evaluation.positions", str(positions)]
    try:
        return as_kept(run_entente([*arguments, *words], runs_root, name))
    finally:
        shutil.rmtree(runs_root / name, ignore_errors=True)


def as_kept(run: RunFigures) -> dict[str, Any]:
    """The stored result of a run of the new way."""
    names = ("time/step_s", "time/train_s", "time/orchestration_s", "train/decisions", "rollout/decisions")
    return {
        **{name.removeprefix("time/"): run.settled(name) for name in names},
        "cpu_a_step": run.cpu_a_step,
        "lags": run.lags,
        **{name: run.summary[name] for name in ("base_score", "trained_score", "trained_ci")},
    }


def _old_way(
    wanted: Wanted, setting: Setting, cache: Path, evaluation: EvaluationSettings, budget_s: float, depth: int
) -> dict[str, Any]:
    setting.folder.mkdir(parents=True, exist_ok=True)
    spec = spec_of(
        setting=setting,
        cache=cache,
        evaluation=evaluation,
        budget_s=budget_s,
        depth=depth,
        scores=wanted.score,
    )
    file = setting.folder / "spec.json"
    file.write_text(json.dumps(spec))
    lines = run_old(file)
    steps = [line for line in lines if "step" in line]
    scores = {name: line[name] for line in lines if "base" in line for name in ("base", "trained")}
    return {"steps": steps, **scores}


def run_old(spec_file: Path) -> list[dict[str, Any]]:
    """Run the old way's program; returns the objects that it printed.

    Raises:
        TrainingError: the program failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.old_way.run", str(spec_file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise TrainingError(f"the old way ended with {done.returncode}: {last}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# -- figures ---------------------------------------------------------------------------------------------------------------


def figures(new: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of all rounds; ratios are medians of the rounds' ratios."""
    rounds = [_round(mine, theirs) for mine, theirs in zip(new, old, strict=True)]
    metrics = {name: median(each[name] for each in rounds) for name in rounds[0]}
    lags = [lag for each in new for lag in each["lags"]]
    metrics |= {
        "speedup_lowest": min(each["speedup"] for each in rounds),  # the range that the page shows
        "speedup_highest": max(each["speedup"] for each in rounds),
        "policy_lag_p50": quantile(lags, 0.5),
        "policy_lag_p99": quantile(lags, 0.99),
        "policy_lag_max": float(max(lags, default=0)),
    }
    if all("base" in each for each in old):
        metrics |= _scores(new[0], old[0])
    return metrics


def _round(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, float]:
    step_s, trained = sum(new["step_s"]), sum(new["train/decisions"])
    count = len(new["step_s"])
    theirs = old["steps"][1:]
    old_s, old_trained = sum(step["wall_s"] for step in theirs), sum(step["trained"] for step in theirs)
    # A step of either way has as many trained decisions as one of the new way.
    old_step_s = old_s / old_trained * (trained / count)
    old_cpu_s = sum(step["cpu_s"] for step in theirs) / old_trained * (trained / count)
    return {
        "steps_per_hour": 3600 * count / step_s,
        "steps_per_hour_old_way": 3600 / old_step_s,
        "speedup": old_step_s / (step_s / count),
        "speedup_cpu": old_cpu_s / new["cpu_a_step"],
        "cpu_s_a_step": new["cpu_a_step"],
        "cpu_s_a_step_old_way": old_cpu_s,
        "decisions_per_s": sum(new["rollout/decisions"]) / step_s,
        "decisions_a_step": sum(new["rollout/decisions"]) / count,
        "trained_a_step": trained / count,
        "trainer_idle_share": 1 - sum(new["train_s"]) / step_s,
        "orchestration_share": sum(new["orchestration_s"]) / step_s,
        "old_way_trainer_idle_share": 1 - sum(step["train_s"] for step in theirs) / old_s,
    }


def _scores(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, float]:
    found = {
        "score_base": new["base_score"],
        "score_equal_wall": new["trained_score"],
        "score_base_old_way": old["base"]["mean"],
        "score_equal_wall_old_way": old["trained"]["mean"],
    }
    # With too few source games there is no interval.
    for name, interval in (("score_equal_wall", new["trained_ci"]), ("score_equal_wall_old_way", old["trained"]["ci"])):
        if interval is not None:
            found[f"{name}_low"], found[f"{name}_high"] = interval
    return found
