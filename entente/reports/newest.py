"""The newest figures of a run, for the terminal's `entente watch` and for the page: progress, curves, shares of the stages."""

import math
import time
from collections.abc import Mapping

from entente.evaluation.intervals import format_count
from entente.reports.read_run import RecordedRun
from entente.telemetry.stages import STAGES, stages_of
from storage.files import file_marks
from storage.ledger import ledger_path
from storage.runs import RunPaths

_CURVES = (
    ("return", "train/reward", "{0:+.3f}"),
    ("entropy", "train/entropy", "{0:.3f} nats"),
    ("gradient", "train/grad_norm", "{0:.3g}"),
    ("mismatch", "train/log_ratio_lag0_p99", "{0:.2g} nats"),
    ("masked", "train/masked_share", "{0:.1%} of the tokens"),
    ("versions behind", "train/policy_lag_p50", "{0:.0f}"),
    ("decisions", "train/decisions", "{0:,.0f} a step"),
    ("tokens", "rollout/tokens_per_s", "{0:,.0f} sampled a second"),
    ("unique", "train/unique_tokens_per_s", "{0:,.0f} trained a second"),
    ("prefix hits", "rollout/prefix_hit_share", "{0:.0%}"),
    ("requests together", "rollout/occupancy", "{0:.0f}"),
    ("GPU", "gpu/utilisation", "{0:.0%} busy"),
    ("GPU memory", "gpu/memory_share", "{0:.0%} of the fullest"),
    ("power", "gpu/power_w", "{0:,.0f} W of all GPUs"),
    ("groups in flight", "queue/in_flight", "{0:.0f}"),
    ("groups ready", "queue/ready", "{0:.0f}"),
    ("memory", "memory/trainer_mib", "{0:,.0f} MiB of the trainer"),
)
NEWEST = 20
"""Steps whose time is summed."""


def curves(run: RecordedRun) -> list[tuple[str, list[float], str]]:
    """(title, a value per step that has a finite one, the newest in words, also one that is not finite)."""
    found = []
    for title, name, form in _CURVES:
        values = [figures[name] for figures in run.steps.values() if name in figures]
        if finite := [value for value in values if math.isfinite(value)]:  # a skipped update may have no gradient norm
            found.append((title, finite, form.format(values[-1])))
    return found


def stage_shares(run: RecordedRun, last: int = NEWEST) -> Mapping[str, float]:
    """Share of each stage in the time of the newest steps; empty without one."""
    each = [stages_of(figures) for figures in list(run.steps.values())[-last:]]
    whole = sum(sum(parts.values()) for parts in each)
    return {part: sum(parts[part] for parts in each) / whole for part in STAGES} if whole else {}


def progress(run: RecordedRun) -> str:
    state = "is at work" if run.at_work else "is not at work"
    if run.is_over:
        state = "is done"
    elif run.quiet_s > 60:
        state += f", nothing was written for {run.quiet_s / 60:.0f} minutes"
    words = f"{run.name}: {run.done} of {format_count(run.planned, 'steps')}; it {state}"
    seconds = [figures["time/step_s"] for figures in list(run.steps.values())[-NEWEST:]]
    if seconds and run.at_work and not run.is_over:
        each = sum(seconds) / len(seconds)
        words += f"; {3600 / each:,.0f} steps an hour, {each * (run.planned - run.done) / 60:,.0f} minutes to go"
    return words


def current_step(paths: RunPaths, run: RecordedRun) -> str:
    """What the files say about the step after the newest finished one; empty if no process works on the run."""
    step = run.done + 1
    if not run.at_work or step > run.planned:
        return ""
    for path, what in (
        (paths.adapter(step), "is trained and published; its figures come next"),
        (paths.checkpoint(step), "is trained and saved; the new version is published next"),
        (ledger_path(paths, step), "has its rows, and the trainer computes"),
    ):
        if (marks := file_marks(path)) is not None:
            return f"Step {step} {what}, since {max(0.0, time.time() - marks[1] / 1e9):.0f} s."
    return f"Step {step} waits for its rollouts."
