"""Marks of settings fields that say when a setting may change, for example `Annotated[int, MAY_CHANGE]`.

A field's own mark overrides that of its section. A field without a mark may not change within a run.
"""

from collections.abc import Sequence
from enum import Enum

from pydantic import BaseModel


class ChangeRule(Enum):
    """When a resumed run may have another value of a setting."""

    ON_RESUME = "on resume"
    """At any time: neither the run's rows nor its weights depend on it."""
    IN_A_FORK = "in a fork"
    """Only in a new lineage: rows or weights depend on it."""
    NEVER = "never"
    """In no resumed run: the checkpoint's weights depend on it."""


MAY_CHANGE = ChangeRule.ON_RESUME
MAY_CHANGE_IN_A_FORK = ChangeRule.IN_A_FORK
STAYS = ChangeRule.NEVER


def change_rule(model: type[BaseModel], path: Sequence[str]) -> ChangeRule:
    """The rule of the setting at `path` below `model`; a field inside a table has the table's rule."""
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
