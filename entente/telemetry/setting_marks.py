"""Base class and value types of all settings, and marks of those that may change on resume.

Mark a field as `Annotated[int, MAY_CHANGE]`; this overrides its section's mark. An unmarked field may not change within a run."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, Any, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """A section of settings: frozen, refuses unknown names, infinite numbers and NaN, and booleans for numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, tree: Any) -> Any:
        for name, value in tree.items() if isinstance(tree, Mapping) else ():
            field = cls.model_fields.get(name)
            types = set() if field is None else _types_in(field.annotation)
            if types & {int, float} and not types & {bool, Any}:
                for boolean in _booleans_in(value):
                    raise ValueError(f"{name} takes numbers, got {str(boolean).lower()}")
        return tree


def _types_in(annotation: Any) -> set[Any]:
    """The types of a value and of what it may contain."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return set()  # checks its own
    parts = get_args(annotation)
    return set().union(*map(_types_in, parts)) if parts else {annotation} if isinstance(annotation, Hashable) else set()


def _booleans_in(value: Any) -> Iterator[bool]:
    if isinstance(value, bool):
        yield value
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        yield from _booleans_in(part)


_ONE_LAYER = ContextVar("one_layer", default=False)


@contextmanager
def one_layer() -> Iterator[None]:
    """Settings made within it are one of several layers, as the flags of a command beside its preset and files."""
    token = _ONE_LAYER.set(True)
    try:
        yield
    finally:
        _ONE_LAYER.reset(token)


def all_layers_merged() -> bool:
    """Whether settings can be compared with each other: within `one_layer` the others may have other values in other layers."""
    return not _ONE_LAYER.get()


Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""A seed that every random generator accepts."""


def check_http(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"'{address}' is no address: write http://HOST:PORT or https://HOST")
    return address


HttpAddress = Annotated[str, AfterValidator(check_http)]


class ChangeRule(Enum):
    """Whether a resumed run may change a setting."""

    ON_RESUME = "on resume"
    """At any time: neither the run's rows nor its weights depend on it."""
    RECORDED = "on resume, and recorded"
    """At any time: which rows a step uses depends on it, and each ledger records its value."""
    NEVER = "never"
    """In no resumed run: rows or weights depend on it."""


MAY_CHANGE = ChangeRule.ON_RESUME
MAY_CHANGE_RECORDED = ChangeRule.RECORDED
STAYS = ChangeRule.NEVER


def change_rule(model: type[BaseModel], path: Sequence[str]) -> ChangeRule:
    """The rule of the setting at `path` below `model`; a field in a table has the table's."""
    rule = ChangeRule.NEVER
    for name in path:
        field = model.model_fields.get(name)
        if field is None:
            break
        rule = next((mark for mark in field.metadata if isinstance(mark, ChangeRule)), rule)
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            break
        model = field.annotation
    return rule


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def leaves(tree: Mapping[str, Any], prefix: str = "", spell: Callable[[str], str] = str) -> dict[str, Any]:
    """Values by dotted name; raises ValueError if `tree` has a name both in a table and as one dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + spell(key)
        below = leaves(value, f"{name}.", spell) if isinstance(value, Mapping) else {name: value}
        if twice := sorted(flat.keys() & below.keys()):
            raise ValueError(f"{twice[0]} is given twice: give it once")
        flat |= below
    return flat


def similar_names(name: str, known: Collection[str]) -> list[str]:
    """Settings in other sections with the same last part, else the most similar name, if any."""
    last = name.rpartition(".")[2]
    same = [each for each in known if each != name and each.rpartition(".")[2] == last]
    sections = {each.rpartition(".")[0] for each in known} - {"", name}
    by_last = {each.rpartition(".")[2]: each for each in known}
    near = get_close_matches(name, [*known, *sections], n=1) or [by_last[each] for each in get_close_matches(last, by_last, n=1)]
    return sorted(same)[:3] or near
