"""Names of settings, and suggestions for a misspelled name."""

from collections.abc import Collection, Iterator
from difflib import get_close_matches

from pydantic import BaseModel

_SUGGESTIONS_MAX = 3
"""Suggestions at most, if several sections have a setting of that name."""


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings below a class, in the order in which they are declared."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def similar_names(name: str, known: Collection[str]) -> list[str]:
    """The known settings with the last part of `name` in other sections, else the setting or section that is spelt most like it;
    empty if none is similar enough."""
    last = name.rpartition(".")[2]
    same = [each for each in known if each != name and each.rpartition(".")[2] == last]
    sections = {each.rpartition(".")[0] for each in known} - {"", name}
    by_last = {each.rpartition(".")[2]: each for each in known}
    near = get_close_matches(name, [*known, *sections], n=1) or [by_last[each] for each in get_close_matches(last, by_last, n=1)]
    return sorted(same)[:_SUGGESTIONS_MAX] or near
