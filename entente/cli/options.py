"""Options that several commands share: settings from a preset, files and flags, and the runs to read."""

import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

from entente.settings.layers import DEFAULT_PRESET, layered_settings, resumed_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from storage.runs import LATEST, resolve_run, runs_in

NEWEST_VERSION = -1
AT_LEAST_1 = validators.Number(gte=1)
SEED = validators.Number(gte=0, lt=1 << 32)
"""What NumPy's generators accept."""


def _check_version(type_: Any, value: int) -> None:
    if value < NEWEST_VERSION:
        raise ValueError("Versions are numbers from 0, or -1 for the newest.")


Version = Annotated[int, Parameter(help="Policy version; 0 is the base, -1 the newest.", validator=_check_version)]
Run = Annotated[str, Parameter(help="Name of the run; 'latest': the run that was last written to.")]
RunsRoot = Annotated[Path, Parameter(help="Folder of all runs.")]
OpenPage = Annotated[bool, Parameter(name="--open", help="Show the page in a browser.", negative="")]
AsJson = Annotated[
    bool, Parameter(help="Print the result as one JSON object on standard output; all else goes to standard error.", negative="")
]
DryRun = Annotated[
    bool, Parameter(name="--dry-run", help="Check everything and show the plan; start and write nothing.", negative="")
]
Preset = Annotated[
    str | None,
    Parameter(
        help="Base settings: laptop (the default), lm, gpu-24, gpu-40, gpu-80, gpu-141 or cluster; not with --resume: a run "
        "keeps its own."
    ),
]
ConfigFiles = Annotated[
    list[Path] | None,
    Parameter(name="--config", help="TOML files that override the preset; later ones win.", negative=""),
]
SettingsFlags = Annotated[RunSettings | None, Parameter(name="*", help="Any setting, by its dotted name.")]


def settings_from(
    preset: str | None,
    config: list[Path] | None,
    flags: RunSettings | None,
    *,
    resume: bool = False,
    init_from: str = "",
    dry_run: bool = False,
) -> RunSettings:
    """The checked settings; only flags on the command line override. A resumed run starts from its own settings. `init_from`
    is the RUN:STEP of the initial weights (see `settings_from_step`); `dry_run` makes no tiny model for it."""
    overrides = {} if flags is None else flags.model_dump(exclude_unset=True)
    if resume:
        if preset is not None:
            raise InputError(f"a resumed run keeps its own settings: leave out --preset {preset}, and set what shall change")
        settings = resumed_settings(config or (), overrides)
        _name_latest(str(overrides.get("run")), settings.run, settings.runs_root)
        return settings
    preset = preset or DEFAULT_PRESET
    if init_from:
        from entente.reports.init_from import settings_from_step

        return settings_from_step(init_from, preset, config or (), overrides, make=not dry_run)
    return layered_settings(preset, config or (), overrides)


def which_run(run: str, runs_root: Path) -> str:
    """Resolve "latest", and report the name on standard error."""
    chosen = resolve_run(runs_root, run)
    _name_latest(run, chosen, runs_root)
    return chosen


def _name_latest(asked: str, chosen: str, runs_root: Path) -> None:
    if asked == LATEST:
        sys.stderr.write(f"run {chosen}, the latest in {runs_root}\n")


def which_runs(wanted: Iterable[str], runs_root: Path) -> list[str]:
    """Names of runs without duplicates, in order; `wanted` has names, patterns such as 'sweep-*', and comma-separated lists.
    The matches of a pattern are sorted by name."""
    there = sorted(paths.root.name for paths in runs_in(runs_root))
    chosen: dict[str, None] = {}
    for word in (word for words in wanted for word in words.split(",") if word):
        if word == LATEST:
            chosen[which_run(word, runs_root)] = None
            continue
        matching = [word] if word in there else [name for name in there if fnmatchcase(name, word)]
        if not matching:
            known = f"; runs there: {', '.join(there[-5:])}" if there else ""
            raise InputError(f"no run in '{runs_root}' is called '{word}'{known}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)
