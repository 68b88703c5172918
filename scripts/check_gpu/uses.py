"""Collects from our own source, as text, what it uses of vLLM: names, attributes, calls, overrides, variables, series.

Derived: names imported from vLLM; chains of attributes and calls that begin with them, with parameters annotated with them, or
with variables assigned from such chains; what our subclasses override. A variable that is `Any` to us has its class in
`contract.ROOTS`.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.check_gpu import contract
from scripts.check_gpu.source import PACKAGE, Function

CALLED, ITEM = "()", "[]"
"""Steps of a chain that are no attributes: the result of a call, and an element."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MODULE = re.compile(r"vllm(\.[a-z_0-9]+)+")
_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")
_SERIES = re.compile(r"vllm:[a-z_0-9]+")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a call."""

    count: int
    """Positional arguments, without `*arguments`."""
    keywords: tuple[str, ...]
    complete: bool
    """It has no `*arguments` and no `**named`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of vLLM in our source."""

    place: str
    """File and line."""
    module: str
    """Module of vLLM in which `steps` begins."""
    steps: tuple[str, ...] = ()
    """A name of the module, then attributes, `CALLED` and `ITEM`."""
    call: Call | None = None
    """What the last step is called with."""
    optional: bool = False
    """Our code does without it: an import that may fail, or a read with a default."""
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Methods of our subclass with their parameters, where `steps` is its base."""
    text: str = ""
    """What must occur in the source of `module` instead of `steps`."""

    @property
    def name(self) -> str:
        """The name that is used, as text."""
        return self.text or ".".join([self.module, *self.steps]).replace(f".{CALLED}", CALLED).replace(f".{ITEM}", ITEM)


Chain = tuple[str, tuple[str, ...]]
"""A module of vLLM, and steps from it."""


def collect(root: Path, folders: Iterable[str]) -> list[Use]:
    """All uses in the Python files below `folders` of the repository `root`, without repetitions."""
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    found: dict[tuple, Use] = {}
    for path in files:
        text, place = path.read_text(), str(path.relative_to(root))
        if PACKAGE in text.lower():
            for use in _File(ast.parse(text), place, deep=place.split("/")[0] not in contract.ONLY_IMPORTS).uses():
                found.setdefault((use.name, use.call, tuple(use.overrides.items()), use.optional), use)
    return list(found.values())


class _File:
    """The uses in one file."""

    def __init__(self, tree: ast.Module, place: str, *, deep: bool) -> None:
        """`deep`: look at more than imports."""
        self._tree, self._place, self._deep = tree, place, deep
        self._found: list[Use] = []
        self._imported: dict[str, Chain] = {}

    def uses(self) -> list[Use]:
        """All of them."""
        guarded = {
            id(inner)
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(each.type) for each in node.handlers if each.type)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == PACKAGE:
                for each in node.names:
                    self._imported[each.asname or each.name] = (str(node.module), (each.name,))
                    self._add(node, str(node.module), (each.name,), optional=id(node) in guarded)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._constant(node, node.value)
            elif isinstance(node, ast.keyword) and node.arg and _VARIABLE.fullmatch(node.arg):
                self._constant(node, node.arg)
        if self._deep:
            for owner, function in _functions(self._tree):
                self._function(owner, function)
            for node in ast.walk(self._tree):
                if isinstance(node, ast.ClassDef):
                    self._class(node)
            self._arguments_by_name()
        return self._found

    def _add(self, node: ast.AST, module: str, steps: tuple[str, ...], **more) -> None:
        while steps and steps[-1] in (CALLED, ITEM):  # nothing is asked of the result
            steps = steps[:-1]
        if steps and steps[-1].startswith("__"):  # every object has it
            return
        self._found.append(Use(place=f"{self._place}:{getattr(node, 'lineno', 0)}", module=module, steps=steps, **more))

    def _constant(self, node: ast.AST, value: str) -> None:
        if _MODULE.fullmatch(value):
            self._add(node, value, ())
        elif not self._deep:
            return
        elif _VARIABLE.fullmatch(value):
            self._add(node, "vllm.envs", (), text=f'"{value}"')
        elif _SERIES.fullmatch(value):
            self._add(node, "vllm.v1.metrics.loggers", (), text=f'"{value}"')

    def _class(self, node: ast.ClassDef) -> None:
        methods = {each.name: _names(each) for each in node.body if isinstance(each, _FUNCTIONS)}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self._imported:
                module, steps = self._imported[base.id]
                self._add(node, module, steps, overrides=methods)

    def _arguments_by_name(self) -> None:
        """The keys of dictionaries that a function of ours fills with arguments of a class of vLLM."""
        for where, (module, name) in contract.ARGUMENTS.items():
            place, _, wanted = where.partition("::")
            for _, function in _functions(self._tree) if place == self._place else ():
                if function.name == wanted:
                    keys = [key for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys]
                    keys += [
                        node.slice
                        for node in ast.walk(function)
                        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
                    ]
                    names = {str(key.value) for key in keys if isinstance(key, ast.Constant)}
                    self._add(function, module, (name,), call=Call(0, tuple(sorted(names)), complete=False))

    # -- chains ---------------------------------------------------------------------------------------------------------

    def _function(self, owner: ast.ClassDef | None, function: Function) -> None:
        known = dict(self._imported)
        for text, (module, name) in contract.ROOTS.get(self._place, {}).items():
            known[text] = (module, (name, CALLED))
        methods = [each for each in owner.body if isinstance(each, _FUNCTIONS)] if owner else []
        for method in methods:  # what `self` holds is known to all methods
            inside = known | self._annotated(method)
            for target, value in _assignments(method):
                if target.startswith("self.") and (chain := self._chain(value, inside)):
                    known.setdefault(target, chain)
        known |= self._annotated(function)
        for target, value in _assignments(function):
            if chain := self._chain(value, known):
                known.setdefault(target, chain)
        done: set[int] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                self._call(node, known, done)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and id(node) not in done and (chain := self._chain(node, known)):
                self._add(node, *chain)

    def _annotated(self, function: Function) -> dict[str, Chain]:
        """Parameters annotated with a class of vLLM."""
        found: dict[str, Chain] = {}
        for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            hint = each.annotation
            if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
                hint = ast.parse(hint.value, mode="eval").body
            names = (
                [node.id for node in ast.walk(hint) if isinstance(node, ast.Name)]
                if isinstance(hint, (ast.Name, ast.BinOp))
                else []
            )
            for name in names:
                if name in self._imported:
                    module, steps = self._imported[name]
                    found[each.arg] = (module, (*steps, CALLED))
        return found

    def _chain(self, node: ast.AST, known: Mapping[str, Chain]) -> Chain | None:
        """The module and the steps of an expression that begins with a known one."""
        if isinstance(node, ast.Await):
            return self._chain(node.value, known)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Call)) and (found := known.get(ast.unparse(node))):
            return found
        if isinstance(node, ast.Attribute):
            return _onward(self._chain(node.value, known), node.attr)
        if isinstance(node, ast.Subscript):
            return _onward(self._chain(node.value, known), ITEM)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1:
                return self._chain(node.args[0], known)
            return _onward(self._chain(node.func, known), CALLED)
        return None

    def _call(self, node: ast.Call, known: Mapping[str, Chain], done: set[int]) -> None:
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            if isinstance(name, ast.Constant) and (chain := self._chain(node.args[0], known)):
                module, steps = chain
                self._add(node, module, (*steps, str(name.value)), optional=function.id == "hasattr" or len(node.args) > 2)
        elif (
            isinstance(function, ast.Attribute)
            and function.attr in contract.BY_NAME
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            self._by_name(node, str(node.args[0].value))
        elif chain := self._chain(function, known):
            done.add(id(function))
            self._add(node, *chain, call=_arguments(node))

    def _by_name(self, node: ast.Call, method: str) -> None:
        """A method of vLLM's engines that is called by its name; `collective_rpc` calls one of its workers."""
        call = _arguments(node)
        for module, name in contract.ENGINES:
            self._add(node, module, (name, CALLED, method), call=replace(call, count=call.count - 1))
        if method == "collective_rpc" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            asked, given = str(node.args[1].value), {each.arg: each.value for each in node.keywords}
            if asked in contract.OUR_WORKER_METHODS:
                return
            named, listed = given.get("kwargs"), given.get("args")
            keys = (
                tuple(str(each.value) for each in named.keys if isinstance(each, ast.Constant))
                if isinstance(named, ast.Dict)
                else ()
            )
            count = len(listed.elts) if isinstance(listed, ast.Tuple) else 0
            module, name = contract.WORKER
            self._add(node, module, (name, CALLED, asked), call=Call(count, keys, complete=True))


def _functions(tree: ast.Module) -> Iterator[tuple[ast.ClassDef | None, Function]]:
    """Functions and methods with their class; nested functions belong to the outer one."""
    for node in tree.body:
        if isinstance(node, _FUNCTIONS):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node, each) for each in node.body if isinstance(each, _FUNCTIONS))


def _assignments(function: Function) -> Iterator[tuple[str, ast.AST]]:
    """Targets as text with their values, loops included, in the order of the source."""
    nodes = [
        node
        for node in ast.walk(function)
        if isinstance(node, (ast.Assign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension))
    ]
    for node in nodes:
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            if isinstance(node, ast.comprehension) and any("isinstance" in ast.unparse(each) for each in node.ifs):
                continue  # a narrower class than the container's
            yield ast.unparse(node.target), ast.Subscript(value=node.iter, slice=ast.Constant(value=0), ctx=ast.Load())
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from ((ast.unparse(one), value) for one, value in zip(target.elts, node.value.elts, strict=False))
            else:
                yield ast.unparse(target), node.value


def _onward(chain: Chain | None, step: str) -> Chain | None:
    return (chain[0], (*chain[1], step)) if chain else None


def _names(function: Function) -> tuple[str, ...]:
    """Parameters of a method, without self or cls."""
    names = [each.arg for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]
    return tuple(names[0 if any("staticmethod" in ast.unparse(mark) for mark in function.decorator_list) else 1 :])


def _arguments(node: ast.Call) -> Call:
    plain = [each for each in node.args if not isinstance(each, ast.Starred)]
    named = tuple(each.arg for each in node.keywords if each.arg is not None)
    return Call(len(plain), named, complete=len(plain) == len(node.args) and len(named) == len(node.keywords))
