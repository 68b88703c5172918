"""Checks what `uses` found, and the table of `contract`, against the text of one vLLM."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from scripts.check_gpu import contract
from scripts.check_gpu.source import Class, Parameters, Typed, VllmSource
from scripts.check_gpu.uses import CALLED, ITEM, Use

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A name of vLLM that is missing or changed."""

    name: str
    problem: str
    place: str
    """Where our source uses it."""
    optional: bool
    """Our code does without it."""

    def __str__(self) -> str:
        return f"{self.name}: {self.problem} ({self.place}{'; our code does without it' if self.optional else ''})"


@dataclass(slots=True)
class Answer:
    """How far a use could be followed."""

    problem: str = ""
    stopped_at: str = ""
    """The first step whose type the source does not tell; what follows it is not checked."""


def troubles(uses: Iterable[Use], source: VllmSource) -> list[Trouble]:
    """What is missing or changed in `source`, by name, each once."""
    found: dict[str, Trouble] = {}
    for use in uses:
        if problem := answer(use, source).problem:
            name = use.name if source.path_of(use.module) else use.module  # a missing module is said once
            found.setdefault(name, Trouble(name, problem, use.place, use.optional))
    found |= {each.name: each for each in [*_replaced(source), *_others(source)]}
    return [found[name] for name in sorted(found)]


def answer(use: Use, source: VllmSource) -> Answer:
    """Whether `use` holds in `source`."""
    tree = source.parse(use.module)
    if tree is None:
        return Answer("there is no such module")
    if use.text:
        path = source.path_of(use.module) or ""
        return Answer("" if use.text.encode() in source.read(path) else f"does not occur in {path}")
    if not use.steps:
        return Answer()
    first, *steps = use.steps
    found = source.find(use.module, first)
    if found is None:
        return Answer(f"{use.module} has no {first}")
    if holder := source.class_named(use.module, first):
        if use.overrides:
            return Answer(_override_trouble(holder, use))
        return _follow(Typed(holder), steps, use, source)
    if isinstance(found.node, _FUNCTIONS):
        if steps:
            return Answer(stopped_at=first)
        return Answer(_misfit(source.parameters(found.node, bound=False), use))
    typed = source.type_in(found.module, found.node.annotation) if isinstance(found.node, ast.AnnAssign) else None
    return _follow(typed, steps, use, source) if typed and steps else Answer(stopped_at=first if steps else "")


def _follow(typed: Typed, steps: list[str], use: Use, source: VllmSource) -> Answer:
    """Go from an instance, or from the class itself, along the steps."""
    if not steps:
        return Answer(_misfit(typed.owner.parameters(), use))
    here: Typed = typed
    for number, step in enumerate(steps):
        if step == ITEM:
            if not here.depth:
                return Answer(stopped_at=step)
            here = Typed(here.owner, here.depth - 1)
            continue
        if step == CALLED:  # of a class or of a function: its type is already that of the result
            continue
        if here.depth:
            return Answer(stopped_at=step)
        member = here.owner.find(step)
        if member is None:
            dynamic = here.owner.find("__getattr__")
            return Answer(stopped_at=step) if dynamic else Answer(f"{here.owner.name} has no {step}")
        if number == len(steps) - 1:
            node = member[1]
            return Answer(_misfit(source.parameters(node, bound=True), use) if isinstance(node, _FUNCTIONS) else "")
        following = here.owner.type_of(step)
        if following is None:
            return Answer(stopped_at=step)
        here = following
    return Answer()


def _misfit(takes: Parameters | None, use: Use) -> str:
    """Why the call of `use` does not fit; empty: it fits, is no call, or nothing is known."""
    return takes.trouble(use.call.count, use.call.keywords, complete=use.call.complete) if takes and use.call else ""


def _override_trouble(base: Class, use: Use) -> str:
    for name, ours in use.overrides.items():
        found = base.find(name)
        if found and isinstance(found[1], _FUNCTIONS):
            theirs = base.source.parameters(found[1], bound=True)
            if (*theirs.positional, *theirs.keyword_only) != ours:
                return (
                    f"its {name} takes ({', '.join((*theirs.positional, *theirs.keyword_only))}), ours takes ({', '.join(ours)})"
                )
    missing = sorted(base.abstract() - set(use.overrides))
    return f"our subclass lacks {', '.join(missing)}" if missing else ""


def _replaced(source: VllmSource) -> list[Trouble]:
    """Whether the private methods that we wrap are those that we know."""
    found = []
    for each in contract.REPLACED:
        owner = source.class_named(*each.owner)
        member = owner.find(each.method) if owner else None
        name = ".".join([*each.owner, each.method])
        if owner is None or member is None or not isinstance(member[1], _FUNCTIONS):
            problem = "it is missing"
        else:
            problem = _wrapping_trouble(each, owner, member[1], source)
        if problem:
            found.append(Trouble(name, problem, each.used_in, optional=False))
    return found


def _wrapping_trouble(each: contract.Replaced, owner: Class, method: ast.AST, source: VllmSource) -> str:
    assert isinstance(method, _FUNCTIONS)
    takes = source.parameters(method, bound=True).positional
    if takes != each.parameters:
        return f"it takes ({', '.join(takes)}), not ({', '.join(each.parameters)})"
    returned = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)]
    results = [tuple(ast.unparse(one) for one in node.elts) if isinstance(node, ast.Tuple) else () for node in returned]
    if results != [each.results]:
        return f"it returns {results}, not ({', '.join(each.results)})"
    calls = [
        node
        for node in ast.walk(owner.node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == each.method
    ]
    if not calls or any(call.keywords for call in calls):
        return "it is called with names, or not at all" if calls else "its class does not call it"
    return ""


def _others(source: VllmSource) -> list[Trouble]:
    """Rules of the table that are no chains."""
    found, worker = [], source.class_named(*contract.WORKER)
    for method in contract.OUR_WORKER_METHODS:
        if worker is None or worker.find(method):
            found.append(
                Trouble(
                    ".".join([*contract.WORKER, method]),
                    "vLLM's worker has this method itself",
                    "inference/forced_jump.py",
                    False,
                )
            )
    module, name, times = contract.OUTPUT_TIMES
    stats = source.class_named(module, name)
    found += [
        Trouble(f"{module}.{name}.{each}", f"{name} has no {each}", "inference/vllm_engine.py", False)
        for each in times
        if stats is None or not stats.find(each)
    ]
    return found
