"""Tokenises orders as people and language models write them: text becomes lines of tokens.

Dashes and arrows of every kind, full-width letters, escapes, entities, tags, JSON objects, long names of places, and other words
for an action all become a few kinds of tokens. This module knows no legal orders: `order_grammar` parses the tokens.
"""

import html
import json
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from itertools import chain
from typing import Any

from entente.game.board import POWERS
from entente.game.geography import geography


class Token(Enum):
    UNIT = auto()
    """"A" or "F"."""
    PLACE = auto()
    """Location, with a coast if one is written."""
    ACTION = auto()
    """"-" (moves, retreats), "S", "C", "H", "D" or "B", as a word."""
    DASH = auto()
    """A dash or an arrow, and "to"."""
    VIA = auto()
    WAIVE = auto()
    SOFT = auto()
    """A mark inside an order or between two: a colon, a quote, a tag, a bar of a table."""
    OPEN = auto()
    CLOSE = auto()
    JOIN = auto()
    """A separator of orders or clauses, never inside an order."""
    FILLER = auto()
    """A word that does not change an order."""
    WORD = auto()
    """Any other word."""


@dataclass(frozen=True, slots=True)
class Lexeme:
    kind: Token
    value: str
    text: str


_ACTIONS = {
    "-": "M MOVE MOVES MOVED MOVING GO GOES ATTACK ATTACKS ADVANCE ADVANCES SAIL SAILS MARCH MARCHES ENTER ENTERS MTO CTO "
    "CONVOYED R RETREAT RETREATS RETREATING WITHDRAW WITHDRAWS RTO",
    "S": "S SUP SUPP SUPPORT SUPPORTS SUPPORTING",
    "C": "C CVY CONVOY CONVOYS CONVOYING TRANSPORT TRANSPORTS",
    "H": "H HLD HOLD HOLDS HOLDING STAY STAYS STAND STANDS REMAIN REMAINS",
    "D": "D DSB DISBAND DISBANDS DISBANDED DESTROY DESTROYS REM REMOVE REMOVES REMOVED",
    "B": "B BLD BUILD BUILDS BUILDING",
}
_WORDS: dict[str, tuple[Token, str]] = {
    word: (kind, value)
    for kind, value, words in (
        *((Token.ACTION, action, words) for action, words in _ACTIONS.items()),
        (Token.UNIT, "A", "A AMY ARMY ARMIES"),
        (Token.UNIT, "F", "F FLT FLEET FLEETS"),
        (Token.DASH, "-", "TO INTO TOWARD TOWARDS"),
        (Token.VIA, "VIA", "VIA BY USING"),
        (Token.WAIVE, "WAIVE", "WAIVE WAIVES WAIVED WVE"),
        (Token.JOIN, ",", "AND THEN ALSO WHILE PLUS"),
        (
            Token.FILLER,
            "",
            "THE AN IN AT OF FROM ON UNIT UNITS ITS MY OUR YOUR I WE WILL SHALL IS ARE ORDER ORDERS ACTION TYPE TARGET "
            "DESTINATION JSON CHOOSE PLAY SUBMIT FRENCH GERMAN ENGLISH ITALIAN RUSSIAN TURKISH AUSTRIAN "
            + " ".join(chain(POWERS, (f"{power}'S" for power in POWERS))),
        ),
    )
    for word in words.split()
}
_EVERYDAY = frozenset({"BLACK", "BOTH", "EAST", "EASTERN", "NOR", "PORT", "WEST", "WESTERN"})
_FURTHER = {
    "EAST MED": "EAS",
    "EASTERN MED": "EAS",
    "GULF OF LION": "LYO",
    "GULF OF LIONS": "LYO",
    "MARSEILLE": "MAR",
    "MID ATLANTIC": "MAO",
    "NORTH ATLANTIC": "NAO",
    "SAINT PETERSBURG": "STP",
    "TUNISIA": "TUN",
}

_ARROW = re.compile(
    r"\$?(?<!\\)\\+(?:LONG)?(?:RIGHTARROW|TO)(?![A-Z])\$?|(?<![-=])[-=]+>+|[\u2190-\u21ff\u2794\u2798-\u27af\u27b1-\u27be\u27f0-\u27ff\u2900-\u297f]"
)
_ESCAPE = re.compile(r"\\(?:n|r(?!ight)|t(?!o)|u([0-9a-fA-F]{4})|([\"'/_*\-.\[\]]))")
_MARKER = re.compile(r"^[\s>*#-]*\(?(?:[0-9]{1,3}|[A-Z]|[IVX]{1,4})[.)]\s|\[[ X]?\]")
_LINE_END = re.compile(r"<br ?/?>|</(?:p|li|tr|div)>", re.IGNORECASE)
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
_OBJECT = re.compile(r"\{[^{}]*\}")
_COAST = (
    r"(?:'S(?![A-Z]))?(?:[ /.(_-]{0,3}(?:([NSEW])\.?C(?![A-Z])\.?|(NORTH|SOUTH|EAST|WEST)(?:ERN)? COAST(?![A-Z]))\)?"
    r"|/([NSEW])(?![A-Z])|\(([NSEW])\))?"
)


def lines_of(text: str) -> list[list[Lexeme]]:
    return [[_lexeme(match) for match in _lexer().finditer(_MARKER.sub("", line))] for line in _plain(text).splitlines()]


def _plain(text: str) -> str:
    """The text in capitals, with one dash, one quote, and one line for each JSON object of an order."""
    text = _LINE_END.sub("\n", html.unescape(text))
    for _ in range(2):  # an object of an order may hold one of a unit
        text = _OBJECT.sub(_object, text)
    text = _FIELDS.sub(_fields, text)
    text = unicodedata.normalize("NFKC", _ESCAPE.sub(_unescaped, text))
    text = "".join(_CHARACTERS.get(unicodedata.category(char), char) for char in text).upper()
    return _STRUCK.sub("", _ARROW.sub(" - ", text)).translate(_QUOTES)


_CHARACTERS = {"Pd": "-", "Cf": "", "Mn": "", "Zs": " "}
_QUOTES = str.maketrans({"\u2212": "-", "\u2043": "-", "\t": " "} | dict.fromkeys("\u2018\u2019\u02bc\u00b4", "'"))


def _unescaped(match: re.Match[str]) -> str:
    if match[1]:
        return char if (char := chr(int(match[1], 16))).isprintable() else " "
    return match[2] or "\n"


_ROLES = {
    role: rank
    for rank, roles in enumerate(
        (
            "unittype",
            "unit army fleet location loc province territory",
            "action order ordertype command move type",
            "from origin source supported support supports supportedunit convoyedunit targetunit target",
            "to destination dest targetlocation targetprovince coast",
            "via viaconvoy convoy",
        )
    )
    for role in roles.split()
}
"""Keys of descriptions in the order in which their values make an order; "from" is the unit where nothing else is."""
_UNIT, _SOURCES, _VIA = 1, ("from", "origin", "source"), 5


_FIELDS = re.compile(rf"(?:^[ \t>*-]*(?:{'|'.join(_ROLES)})[*]*:.*(?:\n|\Z))+", re.MULTILINE | re.IGNORECASE)


def _object(match: re.Match[str]) -> str:
    """A JSON object that describes one unit or order as a text of one line; any other object as it is."""
    try:
        table = json.loads(match[0] if '"' in match[0] else match[0].replace("'", '"'))
    except ValueError:
        return match[0]
    return json.dumps(row) if (row := _row(table)) else match[0]


def _fields(match: re.Match[str]) -> str:
    """Lines of "key: value" as one line for each unit or order; a key that returns begins the next one."""
    tables: list[dict[str, Any]] = [{}]
    for line in match[0].splitlines():
        key, value = (part.strip(" \t>*-") for part in line.split(":", 1))
        if key in tables[-1]:
            tables.append({})
        tables[-1][key] = value
    return "".join(f"{_row(table) or ' '.join(table.values())}\n" for table in tables)


def _row(table: Mapping[str, Any]) -> str:
    roles = {key.lower().replace("_", "").replace(" ", ""): value for key, value in table.items()}
    ranks = {role: _ROLES[role] for role in roles if role in _ROLES}
    if len(ranks) < 2 or any(isinstance(value, list) for value in roles.values()):
        return ""
    if _UNIT not in ranks.values():
        ranks |= {role: _UNIT for role in _SOURCES if role in ranks}
    cells = [_cell(rank, roles[role]) for role, rank in ranks.items()]
    return " = ".join(text for _, text in sorted(cells, key=lambda cell: cell[0]) if text)


def _cell(rank: int, value: Any) -> tuple[int, str]:
    if value is None or isinstance(value, bool):
        return rank, "VIA" if value and rank == _VIA else ""
    word = _WORDS.get(str(value).strip().upper())
    return (0 if word is not None and word[0] is Token.UNIT else rank), str(value)


@cache
def _lexer() -> re.Pattern[str]:
    names = sorted(_places(), key=len, reverse=True)
    pattern = "|".join(r"[ .'-]{1,2}".join(map(re.escape, re.split("[ -]", name))) for name in names)
    return re.compile(
        rf"(?<![A-Z0-9])(?P<place>{pattern})(?![A-Z0-9]){_COAST}"
        r"|(?P<tag></?[A-Z][A-Z0-9_:-]* ?/?>|<[A-Z]+ (?=[A-Z_-]+=))"
        r"|(?P<word>[A-Z]+(?:'[A-Z]+)?)|(?P<soft>[:|\"=]|```|,(?=[A-Z]))|(?P<dash>-)|(?P<open>\()|(?P<close>\))|(?P<join>[,;.!?&+/])"
    )


@cache
def _places() -> dict[str, str]:
    return {name: place for name, place in geography().names.items() if name not in _EVERYDAY} | _FURTHER


def _lexeme(match: re.Match[str]) -> Lexeme:
    text = match[0]
    match match.lastgroup:
        case "word":
            kind, value = _WORDS.get(text, (Token.WORD, text))
            return Lexeme(kind, value, text)
        case "tag":
            return Lexeme(Token.SOFT, "|", text)
        case "soft" | "dash" | "open" | "close" | "join" as group:
            return Lexeme(Token[group.upper()], text, text)
    coast = next((part[0] for part in match.groups()[1:5] if part), "")
    name = re.sub("[ .'-]+", " ", match["place"])
    return Lexeme(Token.PLACE, _places()[name] + (f"/{coast}C" if coast else ""), text)
