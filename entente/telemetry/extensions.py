"""Bots, losses and rewards of a user's own package, which settings name as `module:attribute` (docs/extending.md).

A module is imported when its part is first used. The error of an unusable part is one sentence.
"""

import re
from collections.abc import Callable, Collection
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar

from entente.telemetry.errors import InputError, one_line

_PART = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

Part = TypeVar("Part")


class Misfit(Exception):
    """The object of a name is unsuitable. The message continues a sentence that starts with the name."""


def check_named(kind: str, name: str, own: Collection[str]) -> None:
    """Check that `name` is one of `own` or has the form `module:attribute`; imports nothing.

    Args:
        kind: noun for the part, such as "loss".

    Raises:
        InputError: it is neither.
    """
    if name not in own and not _PART.fullmatch(name):
        raise InputError(f"There is no {kind} {name!r}. Known: {', '.join(own)}; one of your own is named 'module:attribute'")


def load_part(kind: str, name: str, accept: Callable[[Any, str], Part]) -> Part:
    """The object that a `module:attribute` names, as `accept` returns it.

    Args:
        accept: gets the object and its name in a sentence; raises Misfit if the object is unsuitable.

    Raises:
        InputError: it cannot be imported or used; names the cure.
    """
    module, _, attribute = name.partition(":")
    try:
        part = getattr(import_module(module), attribute)
    except Exception as error:
        raise InputError(
            f"the {kind} '{name}' cannot be loaded ({type(error).__name__}: {one_line(error)}): install or mend it here"
        ) from error
    try:
        return accept(part, f"{kind} '{name}'")
    except Exception as error:
        why = (
            str(error)
            if isinstance(error, Misfit)
            else f"it failed when it was tried ({type(error).__name__}: {one_line(error)})"
        )
        raise InputError(f"the {kind} '{name}' cannot be used, because {why}: mend it (docs/extending.md)") from error


def check_arguments(function: Any, *names: str) -> None:
    """Raise Misfit if `function` does not accept these positional arguments."""
    try:
        signature(function).bind(*names)
    except TypeError as error:
        raise Misfit(f"it cannot be called with ({', '.join(names)})") from error
