"""Run settings as a flow parameter: Prefect's form shows the twenty most important ones, and the others under `more`.

A setting may be given in its usual place or under `more`. A tree without `more` is valid, so stored parameters stay valid.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.run_settings import RunSettings
from pipeline.setting_names import FIRST_SETTINGS

MORE = "more"


def merge_more(given: Any) -> Any:
    """The settings tree of a form's parameters, without `more`. A value that is no mapping is returned unchanged.

    Raises:
        ValueError: a setting has different values in its usual place and under `more`.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get(MORE), Mapping):
        return given
    return _merge({name: value for name, value in given.items() if name != MORE}, given[MORE])


def _merge(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    tree = dict(one)
    for name, value in other.items():
        if isinstance(tree.get(name), Mapping) and isinstance(value, Mapping):
            tree[name] = _merge(tree[name], value, f"{prefix}{name}.")
        elif name in tree and tree[name] != value:
            raise ValueError(f"{prefix}{name} is {tree[name]!r}, and {value!r} under '{MORE}': give it once")
        else:
            tree[name] = value
    return tree


def split_more(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A settings tree in the form's layout, with less important settings under `more`. The inverse of `merge_more`."""
    first: dict[str, Any] = {}
    more: dict[str, Any] = {}
    for name, value in tree.items():
        if name in FIRST_SETTINGS:
            first[name] = value
        elif isinstance(value, Mapping):
            shown = {key: each for key, each in value.items() if f"{name}.{key}" in FIRST_SETTINGS}
            first |= {name: shown} if shown else {}
            more[name] = {key: each for key, each in value.items() if key not in shown}
        else:
            more[name] = value
    return first | {MORE: more}


class _Form:
    """The JSON schema of the parameter. Prefect's form sorts properties by `position`.

    `patternProperties`, which the form does not show, also accepts the settings under `more` in their usual places.
    """

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        whole = handler.resolve_ref_schema(handler(core))
        firsts: dict[str, list[str]] = {}
        for name in FIRST_SETTINGS:
            section, _, last = name.rpartition(".")
            firsts.setdefault(section or last, []).append(last)
        shown, more, hidden = {}, {}, {}
        for section, schema in whole["properties"].items():
            inner = handler.resolve_ref_schema(schema) if "$ref" in schema else schema
            heading = {"title": section.replace("_", " ").title(), "description": schema.get("description", "")}
            if "properties" not in inner:
                (shown if section in firsts else more)[section] = schema
            elif section in firsts:
                shown[section] = _part(inner, firsts[section], others_too=True) | heading
                rest = [name for name in inner["properties"] if name not in firsts[section]]
                more[section] = _part(inner, rest) | heading
            else:
                more[section] = schema
            if section not in firsts:
                hidden[f"^{section}$"] = schema
        shown = {section: shown[section] for section in firsts}
        shown[MORE] = {
            "type": "object",
            "title": "All Other Settings",
            "description": "All other settings, with their defaults.",
            "properties": _number_properties(more),
            "additionalProperties": False,
        }
        return {name: value for name, value in whole.items() if name != "properties"} | {
            "properties": _number_properties(shown),
            "patternProperties": hidden,
        }


def _part(schema: JsonSchemaValue, names: list[str], *, others_too: bool = False) -> JsonSchemaValue:
    """The schema of a section with only these settings. With `others_too` the others are accepted but not shown."""
    every = schema["properties"]
    part = {name: value for name, value in schema.items() if name not in ("properties", "default")}
    part["properties"] = _number_properties({name: every[name] for name in names})
    if others_too:
        part["patternProperties"] = {f"^{name}$": value for name, value in every.items() if name not in names}
    return part


def _number_properties(properties: Mapping[str, JsonSchemaValue]) -> dict[str, JsonSchemaValue]:
    """The properties with their positions in the form."""
    return {name: {**value, "position": place} for place, (name, value) in enumerate(properties.items())}


SettingsParameter = Annotated[RunSettings, BeforeValidator(merge_more), _Form()]
"""Type of a flow's parameter for run settings."""
