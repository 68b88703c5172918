"""The legal order sets of a decision as a grammar over text, in the notation of XGrammar.

The grammar has one terminal for each site, which is any of its order lines, and rules over these. It spells the same answers as a
legal table does, but over text: tokens that join to a legal answer are accepted however they split it.
"""

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


def to_ebnf(legal: LegalOrders) -> str:
    """The grammar: its root is `root`."""
    answer, lines = answer_rules(legal), ["root ::= start"]
    lines += [f"{name} ::= {' | '.join(map(_alternative, own))}" for name, own in answer.rules.items()]
    for number, own in enumerate(answer.terminals):
        choice = " | ".join(f'"{line}"' for line in own)
        lines.append(f"t{number} ::= {choice}")
    return "\n".join(lines)


def _alternative(step: tuple[int, str]) -> str:
    terminal, after = step
    return f't{terminal} "\\n" {after}' if after else f"t{terminal}"
