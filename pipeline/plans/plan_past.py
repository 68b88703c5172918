"""Dry runs of commands that read a run's past: `runs losses`, `runs replay-step`, `cache refresh`.

Nothing is started, computed or written. Raises what the command itself would refuse its input with.
"""

from pathlib import Path
from typing import Any

from pipeline.refresh_settings import newest_run, refreshed_settings
from pipeline.run_settings import CACHE_FOLDER, RunSettings
from pipeline.threads import usable_cores
from reports.read_run import read_figures
from state_cache.store import find_cache, version_name
from storage.ledger import MAIN, read_ledger, recorded_steps
from storage.lineages import lineage_at
from storage.runs import RunPaths

Forecast = dict[str, Any]


def plan_lab(paths: RunPaths, model: Path, settings: RunSettings, steps: int, caps: list[float]) -> Forecast:
    """The plan of comparing losses on the newest `steps` recorded steps.

    Raises:
        InputError: the run has no finished step.
    """
    from training.checkpoint import checkpoint_steps
    from training.lab import check_comparable, variants

    check_comparable(paths)
    newest, names = checkpoint_steps(paths)[-1], [each.name for each in variants(settings.training, caps)]
    held = [step for step in reversed(recorded_steps(paths, MAIN)) if step <= newest][:steps]
    decisions = {step: _decisions(paths, MAIN, step) for step in held}
    trained_s = _trained_s(paths, held)
    return {
        "command": "runs losses",
        "run": {"name": paths.root.name, "folder": str(paths.root), "checkpoint_step": newest, "model": str(model)},
        "work": {
            "steps_at_most": len(held),
            "recorded_steps": ", ".join(map(str, sorted(held))),
            "decisions": sum(decisions.values()),
            "losses": len(names),
            "names": ", ".join(names),
            "forward_passes_of_each_decision": 1,
            "backward_passes_of_each_decision": len(names),
        },
        # A backward pass costs about two forward passes.
        "time": _time(trained_s and trained_s * (1 + 2 * len(names)) / 3),
        "threads": {"cores": usable_cores()},
    }


def plan_replay_step(paths: RunPaths, step: int, model: Path, settings: RunSettings) -> Forecast:
    """The plan of running `step` again.

    Raises:
        InputError: the step never was, is not done, or what it rests on is gone.
    """
    from training.checkpoint import checkpoint_steps
    from training.replay import recorded_outcome

    recorded_outcome(paths, step, settings.training)
    lineage = lineage_at(paths, step)
    start = max((each for each in checkpoint_steps(paths) if each < step), default=0)
    replayed = range(start + 1, step + 1)
    return {
        "command": "runs replay-step",
        "run": {"name": paths.root.name, "folder": str(paths.root), "lineage": lineage, "model": str(model)},
        "work": {
            "begins_from": f"the checkpoint of step {start}" if start else "the first weights",
            "steps_replayed": len(replayed),
            "decisions": sum(_decisions(paths, lineage, each) for each in replayed),
        },
        "time": _time(_trained_s(paths, replayed)),
        "threads": {"cores": usable_cores()},
    }


def plan_refresh(run: str, runs_root: Path, share: float) -> Forecast:
    """The plan of refreshing the cache of `run`.

    Raises:
        InputError: no such run, none of its steps is trained, or `share` is none.
    """
    name = newest_run(runs_root) if run == "newest" else run
    settings = refreshed_settings(runs_root, name, share)
    found = find_cache(runs_root / CACHE_FOLDER, settings)
    return {
        "command": "cache refresh",
        "cache": {
            "folder": str(runs_root / CACHE_FOLDER / version_name(settings)),
            "train_positions": settings.train_snapshots,
            "reached_by_the_policy_about": round(settings.train_snapshots * share),
            "held_out_positions": settings.held_out_snapshots,
        },
        "work": {"run": name, "start_groups_read": settings.from_groups},
        "reused_or_made": {"state_cache": "found: nothing to do" if found else "to be built"},
    }


def _decisions(paths: RunPaths, lineage: str, step: int) -> int:
    rows = read_ledger(paths, lineage, step)
    return 0 if rows is None else rows.num_rows


def _trained_s(paths: RunPaths, steps: "range | list[int]") -> float:
    """Seconds that the trainer took for these steps, as the run's figures tell; 0 where they do not."""
    figures = read_figures(paths)[1]
    return sum(figures.get(step, {}).get("time/train_s", 0.0) for step in steps)


def _time(seconds: float) -> Forecast:
    if not seconds:
        return {"about": "unknown: the run has no figures of these steps"}
    return {"seconds_about": max(1, round(seconds)), "basis": "the seconds that the run's trainer took for these steps"}
