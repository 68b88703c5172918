"""Plans of commands that read recorded steps: `runs replay-step`, `cache refresh`.

Nothing is started or written. Wrong input raises the same errors as in the command itself.
"""

from pathlib import Path
from typing import Any

from pipeline.refresh_settings import newest_run, refreshed_settings
from pipeline.run_settings import CACHE_FOLDER, RunSettings
from pipeline.shared_cache import find_shared_cache
from pipeline.threads import usable_cores
from reports.read_figures import read_figures
from state_cache.store import version_name
from storage.ledger import read_ledger
from storage.lineages import lineage_at
from storage.run_roots import as_given
from storage.runs import RunPaths

Forecast = dict[str, Any]


def plan_replay_step(paths: RunPaths, step: int, model: Path, settings: RunSettings) -> Forecast:
    """The plan of replaying `step`.

    Raises:
        InputError: there is no such finished step, or files that it needs are missing.
    """
    from storage.ledger_copies import checkpoint_steps
    from training.replay import recorded_outcome

    recorded_outcome(paths, step, settings.training)
    lineage = lineage_at(paths, step)
    start = max((each for each in checkpoint_steps(paths) if each < step), default=0)
    replayed = range(start + 1, step + 1)
    return {
        "command": "runs replay-step",
        "run": {"name": paths.root.name, "folder": as_given(paths.root), "lineage": lineage, "model": str(model)},
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
        InputError: no such run, none of its steps is trained, or `share` is not between 0 and 1.
    """
    name = newest_run(runs_root) if run == "newest" else run
    settings = refreshed_settings(runs_root, name, share)
    found = find_shared_cache(runs_root, settings)
    return {
        "command": "cache refresh",
        "cache": {
            "folder": as_given(runs_root / CACHE_FOLDER / version_name(settings)),
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


def _trained_s(paths: RunPaths, steps: range) -> float:
    """Seconds that the trainer took for these steps, from the run's metrics; 0 if they are missing."""
    figures = read_figures(paths)[1]
    return sum(figures.get(step, {}).get("time/train_s", 0.0) for step in steps)


def _time(seconds: float) -> Forecast:
    if not seconds:
        return {"about": "unknown: the run has no metrics of these steps"}
    return {"seconds_about": max(1, round(seconds)), "basis": "the seconds that the run's trainer took for these steps"}
