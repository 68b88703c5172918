"""Reads vLLM as text: which names its modules define, what their classes have, and what their functions take.

Nothing of vLLM is imported, so a CUDA wheel is read on a machine without CUDA. Types are followed as far as annotations and
constructor calls tell them. A name that a module gets from outside vLLM counts as defined.
"""

import ast
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "vllm"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CONTAINERS = {"list", "List", "Sequence", "Iterable", "Iterator", "tuple", "set", "AsyncGenerator", "AsyncIterator", "Generator"}
_WRAPPERS = {"Optional", "Final", "ClassVar", "Annotated", "type", "Type", "SkipValidation", "Awaitable"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Found:
    """A definition: the module that has it, and its node; None where it comes from outside vLLM."""

    module: str
    node: ast.AST | None


@dataclass(frozen=True, slots=True)
class Typed:
    """A class of vLLM, or a container (`depth` 1) of its instances."""

    owner: "Class"
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a function takes, without self or cls."""

    positional: tuple[str, ...]
    keyword_only: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    any_positional: bool = False
    any_keyword: bool = False

    def trouble(self, count: int, keywords: tuple[str, ...], *, complete: bool) -> str:
        """Why a call with `count` positional arguments and these keywords does not fit; empty: it fits.

        Args:
            complete: the call has no `*arguments` and no `**named`, so what is required must be there.
        """
        if count > len(self.positional) and not self.any_positional:
            return f"takes {len(self.positional)} positional arguments, not {count}"
        unknown = [name for name in keywords if name not in (*self.positional, *self.keyword_only)]
        if unknown and not self.any_keyword:
            return f"does not take {', '.join(unknown)}"
        missing = self.required - set(self.positional[:count]) - set(keywords)
        return f"also requires {', '.join(sorted(missing))}" if missing and complete else ""


class Class:
    """A class of vLLM, by its source."""

    def __init__(self, source: "VllmSource", module: str, node: ast.ClassDef) -> None:
        self.source, self.module, self.node = source, module, node

    @property
    def name(self) -> str:
        """Module and name."""
        return f"{self.module}.{self.node.name}"

    @cached_property
    def ancestry(self) -> list["Class"]:
        """This class and its bases in vLLM, nearest first."""
        found: list[Class] = [self]
        for base in self.node.bases:
            above = self.source.class_of(self.module, base)
            found += [each for each in (above.ancestry if above else []) if each.name not in {one.name for one in found}]
        return found

    @cached_property
    def _members(self) -> dict[str, tuple[ast.AST, Function | None]]:
        """Each member's node, and the method that sets it (None: it is in the class body)."""
        members: dict[str, tuple[ast.AST, Function | None]] = {}
        for node in _statements(self.node.body):
            for name in _bound_names(node):
                members.setdefault(name, (node, None))
        for method in (node for node in self.node.body if isinstance(node, _FUNCTIONS)):
            for node in ast.walk(method):
                targets = (
                    node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
                )
                for target in (one for each in targets for one in (each.elts if isinstance(each, ast.Tuple) else [each])):
                    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                        members.setdefault(target.attr, (node, method))
        return members

    def find(self, member: str) -> tuple["Class", ast.AST, Function | None] | None:
        """The class of the ancestry that has `member`, its node, and the method that sets it."""
        for each in self.ancestry:
            if member in each._members:
                return each, *each._members[member]
        return None

    def parameters(self) -> Parameters | None:
        """What the constructor takes: `__init__`, else the annotated fields; None: it is not known."""
        if found := self.find("__init__"):
            node = found[1]
            return self.source.parameters(node, bound=True) if isinstance(node, _FUNCTIONS) else None
        fields: dict[str, bool] = {}
        for each in reversed(self.ancestry):
            optional = "total=False" in map(ast.unparse, each.node.keywords)  # of a TypedDict
            for node in each.node.body:
                if (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and "ClassVar" not in ast.unparse(node.annotation)
                ):
                    is_needed = node.value is None and "NotRequired" not in ast.unparse(node.annotation)
                    fields[node.target.id] = is_needed and not optional
        return (
            Parameters(tuple(fields), required=frozenset(name for name, needed in fields.items() if needed)) if fields else None
        )

    def abstract(self) -> set[str]:
        """Names of methods that a subclass has to define."""
        found: dict[str, bool] = {}
        for each in reversed(self.ancestry):
            for node in each.node.body:
                if isinstance(node, _FUNCTIONS):
                    found[node.name] = any("abstractmethod" in ast.unparse(mark) for mark in node.decorator_list)
        return {name for name, is_abstract in found.items() if is_abstract}

    def type_of(self, member: str) -> Typed | None:
        """The class of vLLM that `member` holds an instance of; for a function, of what it returns; None: not known."""
        found = self.find(member)
        if found is None:
            return None
        owner, node, method = found
        if isinstance(node, _FUNCTIONS):
            return self.source.type_in(owner.module, node.returns)
        if isinstance(node, ast.AnnAssign):
            return self.source.type_in(owner.module, node.annotation)
        return owner._type_of_value(node.value, method) if isinstance(node, ast.Assign) else None

    def _type_of_value(self, value: ast.AST, method: Function | None) -> Typed | None:
        if isinstance(value, ast.BoolOp):
            return next(filter(None, (self._type_of_value(each, method) for each in value.values)), None)
        if isinstance(value, ast.IfExp):
            return self._type_of_value(value.body, method) or self._type_of_value(value.orelse, method)
        if isinstance(value, ast.Call):
            if made := self.source.class_of(self.module, value.func):
                return Typed(made)
            holder = self.source.class_of(self.module, value.func.value) if isinstance(value.func, ast.Attribute) else None
            return holder.type_of(value.func.attr) if holder and isinstance(value.func, ast.Attribute) else None
        if isinstance(value, ast.Name) and method is not None:
            arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
            hint = next((each.annotation for each in arguments if each.arg == value.id), None)
            return self.source.type_in(self.module, hint)
        if isinstance(value, ast.Attribute):
            is_self = isinstance(value.value, ast.Name) and value.value.id == "self"
            holder = Typed(self) if is_self else self._type_of_value(value.value, method)
            return holder.owner.type_of(value.attr) if holder and not holder.depth else None
        return None


class VllmSource:
    """vLLM's Python files, in a wheel or in an installation."""

    def __init__(self, place: Path) -> None:
        """`place`: a wheel, or the folder that contains the folder `vllm`."""
        self.place = place
        self._wheel = zipfile.ZipFile(place) if place.is_file() else None
        self.modules_read: set[str] = set()
        self._parsed: dict[str, ast.Module | None] = {}
        self._classes: dict[tuple[str, str], Class | None] = {}

    @cached_property
    def files(self) -> frozenset[str]:
        """Paths of all Python files, beginning with `vllm/`."""
        if self._wheel:
            return frozenset(name for name in self._wheel.namelist() if name.startswith(f"{PACKAGE}/") and name.endswith(".py"))
        return frozenset(str(path.relative_to(self.place)) for path in (self.place / PACKAGE).rglob("*.py"))

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self._wheel.read(path) if self._wheel else (self.place / path).read_bytes()

    def path_of(self, module: str) -> str | None:
        """The file of a module; None: there is none."""
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.files), None)

    def parse(self, module: str) -> ast.Module | None:
        """The syntax tree of a module; None: there is no such module."""
        if module not in self._parsed:
            path = self.path_of(module)
            if path:
                self.modules_read.add(module)
            self._parsed[module] = ast.parse(self.read(path)) if path else None
        return self._parsed[module]

    def find(self, module: str, name: str, _seen: frozenset[tuple[str, str]] = frozenset()) -> Found | None:
        """The definition of `name` in `module`, through imports inside vLLM; None: the module has no such name."""
        if (module, name) in _seen or (tree := self.parse(module)) is None:
            return None
        seen, starred = _seen | {(module, name)}, []
        for node in reversed([*_statements(tree.body)]):
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(module, self.path_of(module) or "", node)
                for each in node.names:
                    if each.name == "*":
                        starred.append(origin)
                    elif (each.asname or each.name) == name:
                        if origin.split(".")[0] != PACKAGE:
                            return Found(origin, None)
                        if self.path_of(f"{origin}.{each.name}"):
                            return Found(f"{origin}.{each.name}", self.parse(f"{origin}.{each.name}"))
                        return self.find(origin, each.name, seen)
            elif isinstance(node, ast.Import):
                if any((each.asname or each.name.split(".")[0]) == name for each in node.names):
                    return Found(name, None)
            elif name in _bound_names(node):
                return Found(module, node)
        if self.path_of(f"{module}.{name}"):
            return Found(f"{module}.{name}", self.parse(f"{module}.{name}"))
        return next(filter(None, (self.find(origin, name, seen) for origin in starred)), None)

    def class_named(self, module: str, name: str) -> Class | None:
        """The class `name` of `module`, through imports; None: there is none."""
        if (module, name) not in self._classes:
            found = self.find(module, name)
            node = found.node if found else None
            self._classes[module, name] = Class(self, found.module, node) if found and isinstance(node, ast.ClassDef) else None
        return self._classes[module, name]

    def class_of(self, module: str, expression: ast.AST) -> Class | None:
        """The class of vLLM that an expression in `module` names; None: none, or not known."""
        if isinstance(expression, ast.Subscript):
            return self.class_of(module, expression.value)
        if isinstance(expression, ast.Name):
            return self.class_named(module, expression.id)
        if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
            found = self.find(module, expression.value.id)
            return self.class_named(found.module, expression.attr) if found and isinstance(found.node, ast.Module) else None
        return None

    def type_in(self, module: str, hint: ast.AST | None) -> Typed | None:
        """The class of vLLM that an annotation in `module` names; None: none, or not known."""
        if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
            return self.type_in(module, ast.parse(hint.value, mode="eval").body)
        if isinstance(hint, ast.BinOp):
            return self.type_in(module, hint.left) or self.type_in(module, hint.right)
        if isinstance(hint, ast.Subscript):
            outer = ast.unparse(hint.value).split(".")[-1]
            inner = hint.slice.elts[0] if isinstance(hint.slice, ast.Tuple) else hint.slice
            if outer in _WRAPPERS:
                return self.type_in(module, inner)
            if outer in _CONTAINERS:
                item = self.type_in(module, inner)
                return Typed(item.owner, item.depth + 1) if item else None
        if isinstance(hint, (ast.Name, ast.Attribute, ast.Subscript)):
            named = self.class_of(module, hint)
            return Typed(named) if named else None
        return None

    def parameters(self, function: Function, *, bound: bool) -> Parameters:
        """What a function takes; `bound`: without the first of a method."""
        marks = {ast.unparse(mark) for mark in function.decorator_list}
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        optional = {each.arg for each in positional[len(positional) - len(arguments.defaults) :]}
        if bound and "staticmethod" not in marks:
            positional = positional[1:]
        optional |= {
            each.arg for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is not None
        }
        names, only = tuple(each.arg for each in positional), tuple(each.arg for each in arguments.kwonlyargs)
        return Parameters(
            names,
            only,
            frozenset({*names, *only} - optional),
            any_positional=arguments.vararg is not None,
            any_keyword=arguments.kwarg is not None,
        )


def _absolute(module: str, path: str, node: ast.ImportFrom) -> str:
    """The module that `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class body, with those inside `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                yield from _statements(part)


def _bound_names(node: ast.AST) -> list[str]:
    """Names that a statement defines, imports aside."""
    if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    spread = (one for each in targets for one in (each.elts if isinstance(each, ast.Tuple) else [each]))
    return [each.id for each in spread if isinstance(each, ast.Name)]
