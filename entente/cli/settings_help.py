"""`--help` of the commands that take every setting of a run: the twenty most used ones, with the defaults of the chosen preset.

`--help-all` shows all settings, section by section. cyclopts writes the help of all other commands.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, Parameter
from rich.table import Table
from rich.text import Text

from entente.cli.settings_from_flags import SettingsFlags
from entente.cli.terminal import output_console
from entente.settings.reference import settings_in, value_at
from entente.settings.run_settings import layered_settings
from entente.settings.setting_names import FIRST_SETTINGS

HELP, HELP_ALL = ("--help", "-h"), "--help-all"
_COLUMNS = 120
"""Width where there is no terminal."""


def show_settings_help(app: App, words: Sequence[str]) -> bool:
    """Print the help of the command in `words` if it takes run settings. Returns whether it does."""
    names, apps, rest = app.parse_commands([word for word in words if word not in (*HELP, HELP_ALL)])
    command = apps[-1].default_command
    if command is None or all(each.annotation is not SettingsFlags for each in inspect.signature(command).parameters.values()):
        return False
    preset = next(_given("--preset", rest), "laptop")
    settings = layered_settings(preset, [Path(file) for file in _given("--config", rest)])
    show_all = HELP_ALL in words
    console = output_console(_COLUMNS)
    about, examples = _documentation(command)
    console.print(Text(f"Usage: entente {' '.join(names)} [OPTIONS]\n\n{about}\n"))
    console.print(_options(command))
    shown = list(settings_in()) if show_all else [each for name in FIRST_SETTINGS for each in settings_in() if each.name == name]
    title = "All settings" if show_all else f"The {len(shown)} settings that matter first"
    console.print(Text(f"\n{title}, with the defaults of preset {preset}", style="bold"))
    for _, section in groupby(shown, lambda each: each.name.partition(".")[0] if show_all and "." in each.name else ""):
        table = _table()
        for each in section:
            default = value_at(settings, each.name)
            table.add_row(
                Text(_flag(each.name), style="cyan"), Text("" if default == '""' else default), Text(_short(each.description))
            )
        console.print(table)
    console.print(Text("\nExamples", style="bold"))
    console.print(Text("\n".join(f"  {line}" for line in examples)))
    if show_all:
        console.print(Text("\nChoices, units and reasons of each setting: entente settings --markdown"))
    else:
        total = sum(1 for _ in settings_in())
        console.print(
            Text(f"\nAll {total} settings: entente {' '.join(names)} --help-all; another preset's defaults: add --preset")
        )
    return True


def _given(flag: str, words: Sequence[str]) -> Iterator[str]:
    """The values of a flag in `words`: `--flag value` or `--flag=value`."""
    for word, after in pairwise([*words, ""]):
        if word == flag and after:
            yield after
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


def _documentation(command: Callable[..., Any]) -> tuple[str, list[str]]:
    """The docstring of `command`: its text with one line for each paragraph, and its examples."""
    about, _, examples = (inspect.getdoc(command) or "").partition("\n\nExample")
    paragraphs = [" ".join(part.split()) for part in about.replace("`", "").split("\n\n")]
    return "\n".join(paragraphs), [line.strip() for line in examples.splitlines()[1:] if line.strip()]


def _options(command: Callable[..., Any]) -> Table:
    """The command's own options, without the settings."""
    table = _table()
    for name, each in inspect.signature(command).parameters.items():
        option = next((part for part in get_args(each.annotation) if isinstance(part, Parameter)), Parameter())
        if each.annotation is not SettingsFlags:
            flag = next(iter(option.name or ()), f"--{name.replace('_', '-')}")
            default = "" if each.default in (None, False, "", inspect.Parameter.empty) else str(each.default)
            table.add_row(Text(flag, style="cyan"), Text(default), Text(option.help or ""))
    return table


def _table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=28)
    table.add_column(overflow="fold")
    return table


def _short(description: str) -> str:
    """The first part of a setting's sentence: on a screen one line says more than four. docs/settings.md has the rest."""
    ends = r"; |\. " if description.startswith(("'", "Above")) else r"; |\. |: |, such as "
    return re.split(ends, description)[0].rstrip(".")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
