"""Loads a user's bots, losses and rewards, named `module:attribute` in settings, at first use (docs/extending.md)."""

import re
from collections.abc import Callable, Collection
from importlib import import_module
from inspect import signature
from typing import Any, TypeVar

from entente.telemetry.errors import InputError, one_line

_PART = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

Part = TypeVar("Part")


class Misfit(Exception):
    """The object is unsuitable. The message continues a sentence that starts with its name."""


def check_named(kind: str, name: str, own: Collection[str]) -> None:
    """Raise InputError unless `name` is one of `own` or a `module:attribute`; imports nothing. `kind`: noun, such as "loss"."""
    if name not in own and not _PART.fullmatch(name):
        raise InputError(f"There is no {kind} {name!r}. Known: {', '.join(own)}; one of your own is named 'module:attribute'")


def load_part(kind: str, name: str, accept: Callable[[Any, str], Part]) -> Part:
    """The object that a `module:attribute` names, as `accept` returns it; InputError if it cannot be imported or used.

    Args:
        accept: gets the object and its name in a sentence; raises Misfit if the object is unsuitable.
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
    """Raise Misfit unless `function` accepts these positional arguments."""
    try:
        signature(function).bind(*names)
    except TypeError as error:
        raise Misfit(f"it cannot be called with ({', '.join(names)})") from error
