"""Bots, losses and rewards of other installed packages, found by their entry points (docs/extending.md).

Finding reads the metadata of installed packages only. A package is imported when one of its parts is requested by name. A part
may not have the name of one of Entente's own parts.
"""

import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any, Generic, TypeVar

from telemetry.errors import InputError

BOTS, LOSSES, REWARDS = "entente.bots", "entente.losses", "entente.rewards"
KINDS = {BOTS: "scripted player", LOSSES: "loss", REWARDS: "reward component"}
"""Group of entry points -> noun for one of its parts."""
_NAME = re.compile(r"[A-Za-z][\w-]*")

Part = TypeVar("Part")


class Misfit(Exception):
    """An entry point names an unsuitable object. The message ends a sentence that begins with the entry point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One part of an installed package, not loaded yet."""

    group: str
    name: str
    package: str
    """The distribution and its version, as "my-bots 1.0"."""
    entry: EntryPoint

    @property
    def text(self) -> str:
        """Kind, name and package."""
        return f"{KINDS[self.group]} '{self.name}' of the package '{self.package}'"


def found_extensions() -> list[Extension]:
    """All parts of installed packages, by group and name."""
    return list(_scan(tuple(sys.path)))


@lru_cache(maxsize=4)
def _scan(path: tuple[str, ...]) -> tuple[Extension, ...]:
    """Reading the metadata of two hundred packages takes about 50 ms, so it is done once for each `sys.path`."""
    entries = [entry for group in KINDS for entry in entry_points(group=group)]
    found = [
        Extension(group=entry.group, name=entry.name, entry=entry, package=f"{entry.dist.name} {entry.dist.version}")
        for entry in entries
        if entry.dist is not None
    ]
    return tuple(sorted(found, key=lambda each: (each.group, each.name, each.package)))


def name_trouble(extension: Extension, built_in: Collection[str]) -> str:
    """Why the part cannot be requested by its name, as a sentence; empty if it can."""
    others = [
        each.package
        for each in found_extensions()
        if (each.group, each.name) == (extension.group, extension.name) and each.package != extension.package
    ]
    if extension.name in built_in:
        return f"{extension.text} bears the name of one of Entente's own: rename it there, or uninstall the package"
    if others:
        return f"{extension.text} is also brought by '{others[0]}': uninstall one of the two"
    if not _NAME.fullmatch(extension.name) or extension.name.startswith("final_"):
        return (
            f"{extension.text} has a name that settings cannot hold: letters, digits, '-' and '_', a letter first and not "
            "'final_'; rename it there"
        )
    return ""


class Registry(Generic[Part]):
    """Parts of one kind by name: Entente's own and those of installed packages."""

    def __init__(self, group: str, built_in: Mapping[str, Part], accept: Callable[[Any, Extension], Part]) -> None:
        """`accept` turns the object of an entry point into a part; it raises Misfit if the object is unsuitable."""
        self._group, self._built_in, self._accept = group, built_in, accept
        self._loaded: dict[Extension, Part] = {}

    def get(self, name: str) -> Part:
        """The part of that name. A package's part is imported and checked on first use.

        Raises:
            InputError: there is none, or the one of a package cannot be used. One sentence names the package and the cure.
        """
        if name in self._built_in:
            return self._built_in[name]
        extension = self.check(name)
        assert extension is not None, "it is not one of ours"
        if extension not in self._loaded:
            self._loaded[extension] = self._load(extension)
        return self._loaded[extension]

    def check(self, name: str) -> Extension | None:
        """Check that there is a part of that name, without importing it. Returns None for one of Entente's own.

        Raises:
            InputError: there is none, two packages have one, or a package uses the name of one of Entente's own.
        """
        extension = next((each for each in found_extensions() if (each.group, each.name) == (self._group, name)), None)
        if extension is not None and (trouble := name_trouble(extension, self._built_in)):
            raise InputError(trouble)
        if extension is None and name not in self._built_in:
            raise InputError(
                f"There is no {KINDS[self._group]} {name!r}. Known: {', '.join(self.names())}. "
                "If a package brings it, install that package here."
            )
        return extension

    def names(self) -> list[str]:
        """Names of Entente's own parts, then those of packages."""
        return [*self._built_in, *(each.name for each in found_extensions() if each.group == self._group)]

    def _load(self, extension: Extension) -> Part:
        where = f"'{extension.entry.value}'"
        try:
            found = extension.entry.load()
        except Exception as error:
            raise InputError(
                f"the {extension.text} cannot be loaded from {where} ({_one_line(error)}): mend or uninstall that package"
            ) from error
        try:
            return self._accept(found, extension)
        except Exception as error:
            why = str(error) if isinstance(error, Misfit) else f"failed when it was tried ({_one_line(error)})"
            raise InputError(
                f"the {extension.text} cannot be used, because {where} {why}: mend that package (docs/extending.md)"
            ) from error


def check_arguments(function: Any, *names: str) -> None:
    """Refuse what cannot be called with so many positional arguments.

    Raises:
        Misfit: it names the arguments.
    """
    try:
        signature(function).bind(*names)
    except TypeError as error:
        raise Misfit(f"cannot be called with ({', '.join(names)})") from error


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
