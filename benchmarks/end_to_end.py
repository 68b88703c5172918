"""`e2e`: the steps of the whole loop, as `entente train` runs them with the settings of a run.

The first step of each round warms up and is not counted, nor are start-up, making models and scoring. CPU seconds are those of
the process tree.
"""

from collections.abc import Sequence
from statistics import mean, median

from benchmarks.entente_run import RunFigures, short_run
from benchmarks.outcome import Outcome
from entente.pipeline.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter


def bench_e2e(settings: RunSettings, *, rounds: int, steps: int, arguments: Sequence[str]) -> Outcome:
    """Train `rounds` short runs; a figure is the median of the runs.

    Args:
        arguments: arguments of `entente train` that give it `settings`.

    Raises:
        InputError: there are fewer than one round or three steps.
        TrainingError: a run failed.
    """
    if rounds < 1 or steps < 3:
        raise InputError(f"{rounds} rounds of {steps} steps measure nothing: at least 1 round of 3 steps.")
    found = []
    for number in range(1, rounds + 1):
        reporter().say(f"e2e round {number} of {rounds}: {steps} steps")
        with short_run(settings, arguments, steps) as (run, _):
            found.append(figures(run))
    return Outcome(benchmark="e2e", metrics={name: median(each[name] for each in found) for name in found[0]}, targets={})


def figures(run: RunFigures) -> dict[str, float]:
    """Figures of one run."""
    step_s = mean(run.settled("time/step_s"))
    return {
        "steps_per_hour": 3600 / step_s,
        "cpu_s_a_step": run.cpu_a_step,
        "decisions_per_s": mean(run.settled("rollout/decisions")) / step_s,
        "trained_a_step": mean(run.settled("train/decisions")),
        "trainer_idle_share": 1 - mean(run.settled("time/train_s")) / step_s,
        "orchestration_share": mean(run.settled("time/orchestration_s")) / step_s,
        "policy_lag_max": float(max(run.lags, default=0)),
    }
