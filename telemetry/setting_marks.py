"""When a setting may change: a mark that a settings class puts beside the type of a field, `Annotated[int, MAY_CHANGE]`.

A field's own mark comes before that of its section. A field without any mark stays as the run was begun.
"""

from collections.abc import Sequence
from enum import Enum

from pydantic import BaseModel


class ChangeRule(Enum):
    """When a run that goes on may be given another value of a setting."""

    ON_RESUME = "on resume"
    """At any time: neither the run's rows nor its weights depend on it."""
    IN_A_FORK = "in a fork"
    """In a lineage of its own: rows or weights depend on it, so the steps before are another history."""
    NEVER = "never"
    """In no run that goes on: the checkpoint's weights, or the numbers of the start groups, rest on it."""


MAY_CHANGE = ChangeRule.ON_RESUME
MAY_CHANGE_IN_A_FORK = ChangeRule.IN_A_FORK
STAYS = ChangeRule.NEVER


def change_rule(model: type[BaseModel], path: Sequence[str]) -> ChangeRule:
    """The rule of the setting at `path` below `model`; what lies inside a field that is a table has the field's rule."""
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
