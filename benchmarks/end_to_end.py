"""`e2e`: steps an hour of the whole loop beside the old way's, what each improvement is worth, and the scores after equal time.

The new way is the real command, `entente train` with the preset's settings, started as a process. The old way
(`benchmarks/old_way`) is a process too, with its trainer in a second one, over as many start groups, forks and powers, with the
same seed. Steps are compared by the decisions that they train on: the old way's steps are scaled to as many. The two take turns,
round after round. The first step of each warms up and does not count. Both are then scored on the same held-out positions after
the same seconds of training. Start-up, model making and scoring are in neither time.
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
    """How much is measured."""

    rounds: int
    """Times that either way is measured, in turn."""
    steps: int
    """Steps of the new way in a round; the old way takes as many seconds."""
    ablation_steps: int
    """Steps of each arm of the ablation; 0: there is none."""
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
    """Measure; what `kept` has already is read, not measured again.

    Args:
        arguments: those of `entente train` that make it the run of `setting`.
        depth: steps of rollouts that the old way has in flight while it trains.
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
    """What is kept of a run of the new way."""
    names = ("time/step_s", "time/train_s", "time/rollout_s", "time/orchestration_s", "train/decisions", "rollout/decisions")
    kept: dict[str, Any] = {name.split("/")[1] if name.startswith("time") else name: run.settled(name) for name in names}
    summary = run.summary
    return kept | {
        "cpu_a_step": run.cpu_a_step,
        "prompt_tokens": run.settled("rollout/prompt_tokens"),
        "completion_tokens": run.settled("rollout/completion_tokens"),
        "lags": run.lags,
        **{name: summary[name] for name in ("base_score", "base_ci", "trained_score", "trained_ci", "random_score")},
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
    return {"steps": steps, "steps_in_budget": sum(step["in_budget"] for step in steps), **scores}


def run_old(spec_file: Path) -> list[dict[str, Any]]:
    """The lines that the old way's program prints.

    Raises:
        TrainingError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.old_way.run", str(spec_file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise TrainingError(f"the old way ended with {done.returncode}: {last}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# -- figures ---------------------------------------------------------------------------------------------------------------


def figures(new: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of all rounds; ratios are medians of the rounds' ratios."""
    rounds = [_round(mine, theirs) for mine, theirs in zip(new, old, strict=True)]
    metrics = {name: median(each[name] for each in rounds) for name in rounds[0]}
    lags = [lag for each in new for lag in each["lags"]]
    metrics |= {
        "speedup_lowest": min(each["speedup"] for each in rounds),
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
    # As many decisions as the new way trains on make a step of either.
    old_step_s = old_s / old_trained * (trained / count)
    old_cpu_s = sum(step["cpu_s"] for step in theirs) / old_trained * (trained / count)
    stages = {name: theirs[-1]["stages_cpu_s"].get(name, 0) - old["steps"][0]["stages_cpu_s"].get(name, 0) for name in
              theirs[-1]["stages_cpu_s"]}  # fmt: skip
    train_cpu = sum(step["cpu_s"] for step in theirs) - sum(stages.values())
    whole = sum(stages.values()) + train_cpu
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
        "old_way_trained_a_step": old_trained / len(theirs),
        "old_way_trainer_idle_share": 1 - sum(step["train_s"] for step in theirs) / old_s,
        "old_way_rollout_cpu_share": (whole - train_cpu) / whole,
        "old_way_warm_up_share": _warm_up_share(theirs),
        "old_way_steps_in_the_same_time": float(old["steps_in_budget"]),
    }


def _warm_up_share(steps: Sequence[Mapping[str, Any]]) -> float:
    """Of the decisions that the old way drew, those of warm-ups, which nobody trains on."""
    warm, rolled = sum(step["counts"]["warm_up_decisions"] for step in steps), sum(step["rolled"] for step in steps)
    return warm / (warm + rolled)


def _scores(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, float]:
    found = {
        "score_base": new["base_score"],
        "score_equal_wall": new["trained_score"],
        "score_base_old_way": old["base"]["mean"],
        "score_equal_wall_old_way": old["trained"]["mean"],
    }
    # Too few source games have no interval: its ends are then left out.
    for name, interval in (("score_equal_wall", new["trained_ci"]), ("score_equal_wall_old_way", old["trained"]["ci"])):
        if interval is not None:
            found[f"{name}_low"], found[f"{name}_high"] = interval
    return found
