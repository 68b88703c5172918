"""Reads the settings of a run and the figures of its steps, without opening its rows. Nothing is written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.runs import RunPaths
from telemetry.errors import InputError


def read_figures(paths: RunPaths) -> tuple[Mapping[str, Any], dict[int, dict[str, float]]]:
    """Read only the settings of a run and the metrics of its finished steps.

    Raises:
        InputError: there is no run in that folder.
    """
    settings, records = read_settings(paths), read_metrics(paths.metrics, [])
    return settings, {step: figures for step, figures in sorted(records.items()) if "time/step_s" in figures}


def read_settings(paths: RunPaths) -> dict[str, Any]:
    """The resolved tree, as stored.

    Raises:
        InputError: there is no run, or what it stored was altered.
    """
    if not paths.settings.is_file():
        raise InputError(f"there is no run in '{paths.root}': it has no settings.json")
    try:
        settings = json.loads(paths.settings.read_bytes())
        if not isinstance(settings, dict) or not isinstance(settings["steps"], int):
            raise ValueError("its steps are no number")
    except (ValueError, KeyError) as error:
        raise InputError(f"'{paths.settings}' is no whole record of settings ({error}): restore it from a copy") from error
    return settings


def read_metrics(file: Path, troubles: list[str]) -> dict[int, dict[str, float]]:
    """Metrics by step; later lines replace earlier ones. Unreadable lines are counted and skipped."""
    records: dict[int, dict[str, float]] = {}
    cut: list[int] = []
    lines = file.read_bytes().splitlines() if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records[int(record["step"])] = {name: value for name, value in record.items() if "/" in name}
        except (ValueError, KeyError, TypeError):
            cut.append(number)
    if cut:
        which = "its last line is" if cut == [len(lines)] else f"line {', '.join(map(str, cut))} of {len(lines)} is"
        troubles.append(f"{file.name}: {which} no whole record and was left out.")
    return records
