"""Run settings as a parameter of a flow: Prefect's form shows the twenty that matter first, and the rest below `more`.

Both places may be filled, and a whole tree without `more` stays valid, so stored parameters of earlier runs do too.
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
    """Parameters as a form has them, as one tree; what is no mapping stays as it is.

    Raises:
        ValueError: a setting stands in both places, with two values.
    """
    if not isinstance(given, Mapping) or not isinstance(given.get(MORE), Mapping):
        return given
    return _both({name: value for name, value in given.items() if name != MORE}, given[MORE])


def _both(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    tree = dict(one)
    for name, value in other.items():
        if isinstance(tree.get(name), Mapping) and isinstance(value, Mapping):
            tree[name] = _both(tree[name], value, f"{prefix}{name}.")
        elif name in tree and tree[name] != value:
            raise ValueError(f"{prefix}{name} is {tree[name]!r}, and {value!r} below '{MORE}': give it once")
        else:
            tree[name] = value
    return tree


def split_more(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A whole tree as the form has it: what it does not show first lies below `more`. The inverse of `merge_more`."""
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
    """The JSON schema of such a parameter; Prefect's form sorts what it shows by `position`.

    What stands below `more` is accepted in its usual place too, by `patternProperties`, which the form does not show.
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
            said = {"title": section.replace("_", " ").title(), "description": schema.get("description", "")}
            if "properties" not in inner:
                (shown if section in firsts else more)[section] = schema
            elif section in firsts:
                shown[section] = _part(inner, firsts[section], others_too=True) | said
                rest = [name for name in inner["properties"] if name not in firsts[section]]
                more[section] = _part(inner, rest) | said
            else:
                more[section] = schema
            if section not in firsts:
                hidden[f"^{section}$"] = schema
        shown = {section: shown[section] for section in firsts}
        shown[MORE] = {
            "type": "object",
            "title": "All Other Settings",
            "description": "Left as they are, these are the defaults of every setting.",
            "properties": _placed(more),
            "additionalProperties": False,
        }
        return {name: value for name, value in whole.items() if name != "properties"} | {
            "properties": _placed(shown),
            "patternProperties": hidden,
        }


def _part(schema: JsonSchemaValue, names: list[str], *, others_too: bool = False) -> JsonSchemaValue:
    """The schema of a section with these settings alone; `others_too` accepts the others without showing them."""
    every = schema["properties"]
    part = {name: value for name, value in schema.items() if name not in ("properties", "default")}
    part["properties"] = _placed({name: every[name] for name in names})
    if others_too:
        part["patternProperties"] = {f"^{name}$": value for name, value in every.items() if name not in names}
    return part


def _placed(properties: Mapping[str, JsonSchemaValue]) -> dict[str, JsonSchemaValue]:
    """The properties in this order, as the form reads it."""
    return {name: {**value, "position": place} for place, (name, value) in enumerate(properties.items())}


SettingsParameter = Annotated[RunSettings, BeforeValidator(merge_more), _Form()]
"""What a flow that takes run settings declares."""
