"""`entente settings`: what a preset, files and flags come to, and what every setting means."""

import json as jsonlib
from typing import Annotated

from cyclopts import Parameter

from entente.cli.options import ConfigFiles, Preset, SettingsFlags, settings_from


def settings(
    *,
    preset: Preset = "laptop",
    config: ConfigFiles = None,
    markdown: Annotated[
        bool, Parameter(help="Print the reference of all settings instead, as docs/settings.md.", negative="")
    ] = False,
    flags: SettingsFlags = None,
) -> None:
    """Print the settings that a preset, TOML files and flags come to, as a TOML file that `--config` takes back.

    Examples

        entente settings --preset cluster > mine.toml

        entente settings --rollouts.forks-per-group 16

        entente settings --markdown
    """
    from entente.settings.reference import reference

    print(reference() if markdown else _toml(settings_from(preset, config, flags).model_dump(mode="json")), end="")


def _toml(tree: dict[str, object], prefix: str = "") -> str:
    """A tree as TOML: plain values first, then a table for each branch. What is None, TOML cannot say: it is left out."""
    plain = {name: value for name, value in tree.items() if not isinstance(value, dict)}
    lines = [f"{name} = {jsonlib.dumps(value, ensure_ascii=False)}" for name, value in plain.items() if value is not None]
    parts = [f"[{prefix}]\n" if prefix else ""] if lines else []
    parts += ["".join(f"{line}\n" for line in lines)] if lines else []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            parts.append(("\n" if lines or parts else "") + _toml(value, f"{prefix}.{name}" if prefix else name))
    return "".join(parts)
