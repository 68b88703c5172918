"""Run settings of a command: a preset, then TOML files, then flags."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from entente.settings.run_settings import RunSettings, layered_settings, resumed_settings
from storage.runs import LATEST

Preset = Annotated[
    str,
    Parameter(
        help="Settings to begin with: laptop, lm, gpu-24, gpu-40, gpu-80, gpu-141 or cluster; a run that is resumed has its own."
    ),
]
ConfigFiles = Annotated[
    list[Path] | None,
    Parameter(name="--config", help="TOML files laid over the preset; later ones win.", negative=""),
]
SettingsFlags = Annotated[RunSettings | None, Parameter(name="*", help="Any setting, by its dotted name.")]


def settings_from(
    preset: str,
    config: list[Path] | None,
    flags: RunSettings | None,
    *,
    resume: bool = False,
    init_from: str = "",
    dry_run: bool = False,
) -> RunSettings:
    """The checked settings tree. Only flags that were given override. A resumed run starts from its own settings.

    Args:
        init_from: step of another run from which the run begins; see `settings_from_step`.
        dry_run: no model is made for it.
    """
    overrides = {} if flags is None else flags.model_dump(exclude_unset=True)
    if resume:
        settings = resumed_settings(config or (), overrides)
        if overrides.get("run") == LATEST:
            sys.stderr.write(f"run {settings.run}, the latest in {settings.runs_root}\n")
        return settings
    if init_from:
        from entente.cli.init_from import settings_from_step

        return settings_from_step(init_from, preset, config or (), overrides, make=not dry_run)
    return layered_settings(preset, config or (), overrides)
