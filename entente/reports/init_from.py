"""Starts a new run from a step of another: its base model is the old base merged with that step's adapter.

The base is made once, in `_models` next to the runs, and never changes. The old run is not changed."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from entente.reports.publish import Source, find_version, publish_model
from entente.settings.layers import layered_settings, merge_layers, settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from storage.adapters import published_versions
from storage.runs import MODEL_FOLDER, RunPaths, check_name


def settings_from_step(
    source: str, preset: str, files: Iterable[Path], overrides: Mapping[str, Any], *, make: bool = True
) -> RunSettings:
    """Settings of a new run whose base model is a step of another run, RUN:STEP.

    With `make` False nothing is written, and the settings name the old base model, which has the same shape. Raises InputError if
    run, step or base is missing or the settings are invalid, and DataError if the adapter is damaged.
    """
    if overrides.get("inference", {}).get("model"):
        raise InputError(f"--init-from {source} gives the new run its base model: leave out --inference.model")
    files = list(files)
    runs_root = layered_settings(preset, files, overrides).runs_root
    step = _find_step(source, runs_root)
    model = _base_of(step, runs_root) if make else step.base
    return layered_settings(preset, files, merge_layers(dict(overrides), {"inference": {"model": str(model)}}))


def _find_step(source: str, runs_root: Path) -> Source:
    run, _, step = source.rpartition(":")
    if not run or not step.isdecimal():
        raise InputError(f"--init-from takes a run and one of its steps, as mine:20, not '{source}'")
    paths = RunPaths(runs_root / check_name(run, "run"))
    settings_of(paths)  # raises InputError, with the runs that are there
    there = published_versions(paths)
    if int(step) not in there:
        some = ", ".join(map(str, there if len(there) <= 6 else [*there[:2], "...", there[-1]]))
        raise InputError(f"run '{run}' has no adapter of step {step}: it has {f'those of steps {some}' if there else 'none yet'}")
    return find_version(f"{run}:v{int(step)}", runs_root)


def _base_of(source: Source, runs_root: Path) -> Path:
    version = source.version
    assert version is not None, "find_version gives one"
    folder = runs_root / MODEL_FOLDER / f"{version.run}-v{version.version}-{version.adapter_hash[:8]}"
    return folder if folder.is_dir() else publish_model(source, folder, runs_root, most_bytes=math.inf)
