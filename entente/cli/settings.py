"""`entente settings`, and `--help` of commands that take every setting of a run (cyclopts writes the help of all others)."""

import inspect
import json as jsonlib
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import App, Parameter
from rich.table import Table
from rich.text import Text

from entente.cli.options import ConfigFiles, Preset, SettingsFlags, settings_from
from entente.cli.terminal import output_console
from entente.settings.layers import DEFAULT_PRESET, layered_settings, toml_key
from entente.settings.reference import reference, settings_in, value_at

FIRST_SETTINGS = (
    "run",
    "steps",
    "seed",
    "inference.model",
    "rollouts.start_groups",
    "rollouts.forks_per_group",
    "rollouts.horizon_years",
    "rollouts.policy_powers",
    "rollouts.opponents",
    "training.learning_rate",
    "pipeline.buffer_depth",
    "evaluation.positions",
)
"""The settings in `--help`, in this order."""
_COLUMNS = 120
"""Width where there is no terminal."""


def settings(
    *,
    preset: Preset = None,
    config: ConfigFiles = None,
    markdown: Annotated[
        bool, Parameter(help="Print the reference of all settings instead, as in docs/settings.md.", negative="")
    ] = False,
    flags: SettingsFlags = None,
) -> None:
    """Print the settings that result from a preset, TOML files and flags, as a TOML file for `--config`.

    Examples

        entente settings --preset cluster > mine.toml

        entente settings --rollouts.forks-per-group 16

        entente settings --markdown
    """
    print(reference() if markdown else _toml(settings_from(preset, config, flags).model_dump(mode="json")), end="")


def show_settings_help(app: App, words: Sequence[str]) -> bool:
    """Print the help of the command in `words` if it takes run settings. Returns whether it does."""
    names, apps, rest = app.parse_commands([word for word in words if word not in ("--help", "-h")])
    command = apps[-1].default_command
    if command is None or all(each.annotation is not SettingsFlags for each in inspect.signature(command).parameters.values()):
        return False
    preset = next(_values_of("--preset", rest), DEFAULT_PRESET)
    chosen = layered_settings(preset, [Path(file) for file in _values_of("--config", rest)])
    described = {each.name: each for each in settings_in()}
    table = _table()
    for name in FIRST_SETTINGS:
        default, flag = value_at(chosen, name), f"--{name.replace('_', '-')}"
        table.add_row(Text(flag, style="cyan"), Text("" if default == '""' else default), _short(described[name].description))
    console = output_console(_COLUMNS)
    about, examples = _documentation(command)
    console.print(Text(f"Usage: entente {' '.join(names)} [OPTIONS]\n\n{about}\n"))
    console.print(_options(command))
    console.print(
        Text(f"\n{len(FIRST_SETTINGS)} of {len(described)} settings, with the defaults of preset {preset}", style="bold")
    )
    console.print(table)
    console.print(Text("\nExamples", style="bold"))
    console.print(Text("\n".join(f"  {line}" for line in examples)))
    console.print(Text("\nAll settings: entente settings; what each means: entente settings --markdown"))
    return True


def _values_of(flag: str, words: Sequence[str]) -> Iterator[str]:
    for word, after in pairwise([*words, ""]):
        if word == flag and after:
            yield after
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


def _documentation(command: Callable[..., Any]) -> tuple[str, list[str]]:
    about, _, examples = (inspect.getdoc(command) or "").partition("\n\nExample")
    paragraphs = [" ".join(part.split()) for part in about.replace("`", "").split("\n\n")]
    return "\n".join(paragraphs), [line.strip() for line in examples.splitlines()[1:] if line.strip()]


def _options(command: Callable[..., Any]) -> Table:
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


def _short(description: str) -> Text:
    return Text(re.split(r"; |\. |: |, such as " if description[0] != "'" else r"; |\. ", description)[0].rstrip("."))


def _toml(tree: dict[str, object], prefix: str = "") -> str:
    """A tree as TOML: plain values first, then a table per branch. Leaves out None, which TOML does not have."""
    plain = {name: value for name, value in tree.items() if not isinstance(value, dict)}
    texts = {toml_key(name): jsonlib.dumps(value, ensure_ascii=False) for name, value in plain.items() if value is not None}
    lines = [f"{key} = {text}" for key, text in texts.items()]
    parts = [f"[{prefix}]\n" if prefix else ""] if lines else []
    parts += ["".join(f"{line}\n" for line in lines)] if lines else []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            parts.append(("\n" if lines or parts else "") + _toml(value, f"{prefix}.{name}" if prefix else name))
    return "".join(parts)
