"""The reference of all settings, generated from the settings classes for `entente settings` and docs/settings.md."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from entente.settings.run_settings import RunSettings
from entente.telemetry.setting_marks import ChangeRule, change_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    name: str
    """Dotted name, as in a file or a flag."""
    kind: str
    """Type and bounds in words."""
    default: str
    """The default in TOML."""
    description: str
    """The field's docstring on one line."""
    changes: ChangeRule
    """When a resumed run may change it."""


def settings_in(model: type[BaseModel] = RunSettings, prefix: str = "") -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from settings_in(inner, f"{prefix}{name}.")
            continue
        yield Setting(
            name=prefix + name,
            kind=_kind(field),
            default=_toml(field.get_default(call_default_factory=True)),
            description=" ".join((field.description or "").split()),
            changes=change_rule(RunSettings, [*prefix.split(".")[:-1], name]),
        )


def value_at(settings: RunSettings, name: str) -> str:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return _toml(value)


def reference() -> str:
    """The text of docs/settings.md: a table per section, under the docstring of its class."""
    names = {setting.name for setting in settings_in()}
    first = [f"|`{name}`|{why}|" for name, why in FIRST_EIGHT.items() if name in names]
    parts = [_HEAD, "## Turn these eight first", "\n".join(["|setting|when|", "|---|---|", *first])]
    rows = [setting for setting in settings_in() if "." not in setting.name]
    parts += ["## The run itself", _table(rows, cut=0)]
    for name, field in RunSettings.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            heading = " ".join((inner.__doc__ or field.description or "").split())
            parts += [f"## `{name}`", heading, _table(list(settings_in(inner, f"{name}.")), cut=len(name) + 1)]
    return "\n\n".join(parts) + "\n"


FIRST_EIGHT = {
    "inference.model": "always: the model that learns; with another width the learning rate follows it",
    "steps": "the curve still rises at the end; a resumed run may raise it",
    "rollouts.opponents": "the policy wins or loses all forks: stronger or weaker players, or a mix with weights",
    "rollouts.horizon_years": "a year teaches taking centres; two or three teach keeping them, at that many times the cost",
    "rollouts.start_groups": "the curve is noisy: more positions in each step",
    "rollouts.forks_per_group": "many groups have equal returns (`train/groups_zero_std`): more forks to compare",
    "training.learning_rate": "nothing moves: three times as much; `train/ratio_deviation_p99` above 3: a third",
    "pipeline.buffer_depth": "the trainer waits for rollouts (`entente runs explain`): 2; bit-identical repeats need 0 or 1",
}
"""Setting -> when to change it: what to try before all others."""


_HEAD = """# Settings

Every setting of a training run. `entente settings --markdown` writes this page.

Layers, later ones win: a preset (`--preset`), TOML files (`--config`), flags. A dotted name is a flag with dashes
(`--rollouts.forks-per-group 16`), a place in a TOML file (`[rollouts]`, `forks_per_group = 16`) and a name in a deployment's
parameters. `entente settings --preset laptop` prints all values of a preset. A setting marked ↻ may change when a run is
resumed."""


_MARKS = {ChangeRule.ON_RESUME: " ↻", ChangeRule.RECORDED: " ↻", ChangeRule.NEVER: ""}


def _table(settings: list[Setting], cut: int) -> str:
    lines = ["|setting|takes|default| |", "|---|---|---|---|"]
    for each in settings:
        mark = _MARKS[each.changes]
        cells = [f"`{each.name[cut:]}`{mark}", each.kind, f"`{each.default}`", each.description]
        lines.append("|" + "|".join(cell.replace("|", r"\|") for cell in cells) + "|")
    return "\n".join(lines)


def _kind(field: FieldInfo) -> str:
    words = _type_words(field.annotation)
    limits = ((sign, getattr(rule, name, None)) for rule in field.metadata for name, sign in _BOUNDS.items())
    bounds = [f"{sign} {bound if isinstance(bound, int) else f'{bound:g}'}" for sign, bound in limits if bound is not None]
    return f"{words}, {' and '.join(bounds)}" if bounds else words


_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "multiple_of": "a multiple of"}
_WORDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Path": "folder",
    "NoneType": "nothing",
}


def _type_words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        return f"list of {_plural(_type_words(inner[0]))}"
    if origin in (dict,) or str(origin).endswith("Mapping'>"):
        return f"table of {_plural(_type_words(inner[1]))} by name"
    if inner and hasattr(kind, "__metadata__"):  # Annotated
        return _type_words(inner[0])
    if inner:
        return " or ".join(_type_words(each) for each in inner)
    if hasattr(kind, "__members__"):
        return " or ".join(f"`{each.value}`" for each in kind)
    name = getattr(kind, "__name__", str(kind))
    return _WORDS.get(name, re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower())


def _plural(word: str) -> str:
    return {"text": "texts", "integer": "integers", "number": "numbers"}.get(word, word)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return "none" if value is None else json.dumps(value, default=str, ensure_ascii=False)
