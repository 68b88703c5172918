"""Writes order sets as language models do: the other direction of `entente.players.read_answer`."""

import json
import random
from collections.abc import Sequence

from entente.game.geography import geography
from entente.game.legal import WAIVE, LegalOrders, OrderKind

DASHES = [
    "-",
    " - ",
    " -",
    "- ",
    *(f" {dash} " for dash in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\uff0d\u2192"),
    " -> ",
    " --> ",
    " => ",
    " to ",
]
REMARKS = [
    " \u2014 keeps them out of MUN",
    " - this keeps Germany out",
    " \u2013 a build",
    " (A PAR - PIC is weaker)",
    ": the best I have",
    ", for now",
    " because TYR and VIE are threatened",
    ", not A PAR - PIC",
    " instead of F BRE - ENG",
    ". It is safe!",
    " // take it",
]
COASTS = ["/{}", "({})", " {}", " ({})", " ({name} coast)", " {name} coast", " /{}"]
COAST_NAMES = {"NC": "north", "SC": "south", "EC": "east", "WC": "west"}
HEADINGS = [
    "Here are my orders:\n",
    "**Final orders**\n\n",
    "After some thought:\n",
    "ORDERS:\n",
    "",
    "My orders for this turn:\n\n",
]
AFTER = ["", "\n\nGood luck!", "\n\nThese orders keep us safe.", "\n\nAlternatives I rejected: A PAR - PIC, F BRE - ENG."]
BULLETS = ["", "", "- ", "* ", "\u2022 ", "{n}. ", "{n}) ", "({n}) ", "> ", "- [x] ", "Order {n}: ", "{n}: "]
QUOTES = ["{}", "{}", "**{}**", "`{}`", '"{}"', "'{}'", "<order>{}</order>", "*{}*"]
JOINS = ["\n", "\n\n", "\r\n", "; ", ", ", " and ", " / ", "\r", "\u2028", "<br>"]
ACTIONS = {
    "H": [" H", " holds", " Hold", ": HOLD", " - hold", " stands"],
    "S": [" S ", " supports ", " SUPPORT ", ": supports ", " - S "],
    "C": [" C ", " convoys ", " CONVOY ", " transports "],
    "D": [" D", " disband", " disbands", " REMOVE"],
    "B": [" B", " build", " BUILD"],
}

EVERYDAY = {"BLACK", "BOTH", "EAST", "EASTERN", "PORT", "WEST", "WESTERN"}
"""Names of places to the engine, and to everybody else words."""


class Writer:
    """Spells the orders of one set."""

    def __init__(self, legal: LegalOrders, rng: random.Random) -> None:
        self._legal = [order for options in legal.options for order in options]
        self._kind, self._rng = legal.kind, rng
        self._long: dict[str, list[str]] = {}
        for name, place in geography().names.items():
            if len(name) > 3 and name not in EVERYDAY:
                self._long.setdefault(place, []).append(name.title())

    def answer(self, orders: Sequence[str]) -> str:
        """The orders as one whole answer."""
        shape = self._rng.choice([self._text, self._text, self._text, self._list, self._by_unit, self._objects, self._table])
        body = shape(orders)
        fence = self._rng.choice(["{}", "{}", "```\n{}\n```", "```text\n{}\n```", "```{}```", "<answer>\n{}\n</answer>"])
        thought = self._rng.choice(
            ["", "", "<think>\nA PAR H?\nF BRE - ENG\n</think>\n", "Hm, A PAR H\n</think>", "[THINK]WAIVE[/THINK]"]
        )
        return thought + self._rng.choice(HEADINGS) + fence.format(body) + self._rng.choice(AFTER)

    def _text(self, orders: Sequence[str]) -> str:
        pick = self._rng.choice
        bullet, quote, join = pick(BULLETS), pick(QUOTES), pick(JOINS)
        lines = [bullet.format(n=n) + quote.format(self.order(order)) for n, order in enumerate(orders, 1)]
        if join in ("; ", ", ", " and ", " / "):
            return join.join(quote.format(self.order(order)) for order in orders)
        return join.join(line + (pick(REMARKS) if self._rng.random() < 0.4 else "") for line in lines)

    def _list(self, orders: Sequence[str]) -> str:
        value = [self.order(order) for order in orders]
        return json.dumps(self._rng.choice([value, {"reasoning": "A PAR H is passive", "orders": value}]), indent=self._indent)

    def _by_unit(self, orders: Sequence[str]) -> str:
        if self._kind in (OrderKind.BUILD, OrderKind.DISBAND):
            return self._list(orders)
        rest = {order.split(" ", 2)[0] + " " + order.split(" ", 2)[1]: self.order(order) for order in orders}
        return json.dumps(rest, indent=self._indent)

    def _objects(self, orders: Sequence[str]) -> str:
        return json.dumps([self._object(order) for order in orders], indent=self._indent)

    def _object(self, order: str) -> dict[str, object]:
        if order == WAIVE:
            return {"action": "WAIVE", "unit": None}
        kind, place, action, *rest = order.split()
        table: dict[str, object] = {"unit": f"{kind} {place}"} if self._rng.random() < 0.6 else {"type": kind, "location": place}
        if action in ("-", "R"):
            table |= {"action": "retreat" if action == "R" else "MOVE", "to": rest[0]} | ({"via": True} if rest[1:] else {})
        elif action in ("S", "C"):
            table |= {"order": "support" if action == "S" else "CONVOY", "target": " ".join(rest[:2])}
            table |= {"destination": rest[3]} if rest[2:] else {}
        else:
            table["order"] = {"H": "hold", "D": "DISBAND", "B": "build"}[action]
        items = list(table.items())
        if self._rng.random() < 0.3:
            self._rng.shuffle(items)
        return dict(items) | {"reason": "not A PAR - PIC"}

    def _table(self, orders: Sequence[str]) -> str:
        rows = [
            f"| {order.split(' ')[1] if ' ' in order else '-'} | {self.order(order)} | A PAR H is worse |" for order in orders
        ]
        return "\n".join(["| Unit | Order | Why |", "|:--|---|---|", *rows])

    @property
    def _indent(self) -> int | None:
        return self._rng.choice([None, 2])

    def order(self, order: str) -> str:
        """One order."""
        pick, rng = self._rng.choice, self._rng
        if order == WAIVE:
            return pick(["WAIVE", "Waive", "waive the build", "I waive this build"])
        kind, place, action, *rest = order.split()
        if action in ("B", "D") and rng.random() < 0.5:
            verbs = ["Build", "BUILD", "Build:"] if action == "B" else ["Disband", "REMOVE", "Remove:"]
            text = f"{pick(verbs)} {self._unit(kind, place)}"
        elif action in ("-", "R"):
            way = pick([" R ", " retreats to ", *DASHES] if action == "R" else [*DASHES, " moves to ", " MOVE "])
            text = self._unit(kind, place) + way + self._goal(order, rest[0])
            if rest[1:] and (f"{kind} {place} - {rest[0]}" in self._legal or rng.random() < 0.6):
                text += pick([" VIA", " via convoy", " (via convoy)", " by convoy", " VIA CONVOY"])
        elif action in ("S", "C"):
            text = self._unit(kind, place) + pick(ACTIONS[action]) + self._unit(rest[0], rest[1])
            text += pick(DASHES) + self._place(rest[3]) if rest[2:] else pick(["", " H", " to hold"])
        else:
            text = self._unit(kind, place) + pick(ACTIONS[action])
        return pick([text, text, text.lower(), text.upper()])

    def _unit(self, kind: str, place: str) -> str:
        word = self._rng.choice([kind, kind, kind, {"A": "Army", "F": "Fleet"}[kind], {"A": "the army in", "F": "fleet"}[kind]])
        return f"{word} {self._place(place)}"

    def _goal(self, order: str, place: str) -> str:
        """The place, its coast left out where no other coast is legal."""
        bare = place[:3]
        same = [o for o in self._legal if o.split()[:3] == order.split()[:3] and o.split()[3][:3] == bare]
        return self._place(
            bare if "/" in place and len({o.split()[3] for o in same}) == 1 and self._rng.random() < 0.5 else place
        )

    def _place(self, place: str) -> str:
        name, _, coast = place.partition("/")
        spelled = self._rng.choice([name, name, name.lower(), name.title(), self._rng.choice(self._long[name])])
        return spelled + (self._rng.choice(COASTS).format(coast, name=COAST_NAMES[coast]) if coast else "")
