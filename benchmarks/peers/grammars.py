"""The legal order sets of a decision as a grammar over text, in the notations of XGrammar and llguidance.

The grammar has one terminal for each site, which is any of its order lines, and rules over these. It spells the same answers as a
legal table does, but over text: tokens that join to a legal answer are accepted however they split it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from game.legal import WAIVE, LegalOrders, OrderKind


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """Answers as rules. Lines are joined by line breaks; the answer ends after its last line."""

    terminals: tuple[tuple[str, ...], ...]
    """Lines that each terminal matches."""
    rules: dict[str, list[tuple[int, str]]]
    """Rule -> its alternatives: the terminal, then the rule after a line break, or "" at the end. Rule "start" comes first."""


def answer_rules(legal: LegalOrders) -> AnswerRules:
    """The answers that `legal` admits."""
    if legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
        names = ["start", *(f"site_{number}" for number in range(1, len(legal.sites))), ""]
        rules = {name: [(number, names[number + 1])] for number, name in enumerate(names[:-1])}
        return AnswerRules(terminals=legal.options, rules=rules)
    return _choice_of_sites(legal)


def _choice_of_sites(legal: LegalOrders) -> AnswerRules:
    """Builds and disbands choose among the sites in rising order; after a waive follow waives only."""
    sites, may_waive = len(legal.sites), legal.kind is OrderKind.BUILD
    terminals = (*legal.options, (WAIVE,)) if may_waive else legal.options
    rules: dict[str, list[tuple[int, str]]] = {}
    open_states = [(0, 0)]
    while open_states:
        given, first = open_states.pop()
        if _name(given, first) in rules:
            continue
        # Without waives, enough sites must be left for the orders after this one.
        last = sites if may_waive else sites - (legal.picks - given) + 1
        steps = [(site, site + 1) for site in range(first, last)] + ([(sites, sites)] if may_waive else [])
        is_end = given + 1 == legal.picks
        rules[_name(given, first)] = [(site, "" if is_end else _name(given + 1, after)) for site, after in steps]
        if not is_end:
            open_states += [(given + 1, after) for _, after in steps]
    return AnswerRules(terminals=terminals, rules=rules)


def _name(given: int, first: int) -> str:
    return f"given_{given}_from_{first}" if given else "start"


def to_ebnf(answer: AnswerRules) -> str:
    """The grammar for XGrammar: its root is `root`."""
    lines = ["root ::= start", *(f"{name} ::= {_alternatives(own, 't')}" for name, own in answer.rules.items())]
    return "\n".join([*lines, *(f"t{number} ::= {_choice(own)}" for number, own in enumerate(answer.terminals))])


def to_lark(answer: AnswerRules) -> str:
    """The grammar for llguidance, in Lark's notation: terminals are upper case, so its lexer matches each line as one piece."""
    lines = [f"{name}: {_alternatives(own, 'T')}" for name, own in answer.rules.items()]
    return "\n".join([*lines, *(f"T{number}: {_choice(own)}" for number, own in enumerate(answer.terminals))])


def _alternatives(own: Sequence[tuple[int, str]], terminal: str) -> str:
    return " | ".join(f'{terminal}{number} "\\n" {after}' if after else f"{terminal}{number}" for number, after in own)


def _choice(lines: Sequence[str]) -> str:
    return " | ".join(f'"{line}"' for line in lines)
