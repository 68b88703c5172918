"""Orders are read from whatever a model writes, only legal ones leave, and what is missing is counted."""

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entente.game.board import Board
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.positions import board_of
from entente.players.endpoint_players import messages
from entente.players.read_answer import AnswerCounts, no_answer, read_answer
from tests.game.test_paths import convoy_heavy
from tests.players.answer_styles import Writer

LEGAL = Board.start().legal_orders()["FRANCE"]
WANTED = ["F BRE - MAO", "A MAR - SPA", "A PAR S A MAR - BUR"]
BUILD = LegalOrders(
    power="FRANCE", kind=OrderKind.BUILD, sites=("BRE", "PAR"), options=(("A BRE B", "F BRE B"), ("A PAR B",)), picks=2
)
DISBAND = LegalOrders(
    power="FRANCE",
    kind=OrderKind.DISBAND,
    sites=("A GAS", "A PAR", "F STP/SC"),
    options=(("A GAS D",), ("A PAR D",), ("F STP/SC D",)),
    picks=2,
)
STP = LegalOrders(
    power="RUSSIA", kind=OrderKind.MOVEMENT, sites=("F STP/SC",), options=(("F STP/SC - BOT", "F STP/SC H"),), picks=1
)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Here are my orders:\n```\n" + "\n".join(WANTED) + "\n```\nGood luck!", id="a code fence"),
        pytest.param("1. F BRE - MAO\n2) A MAR - SPA\n(3) A PAR S A MAR - BUR", id="numbers"),
        pytest.param("f bre - mao.\na mar-spa\nArmy par supports army mar → bur", id="case, dashes, words"),
        pytest.param("F BRE -> MAO (to the ocean), A MAR - SPA; A PAR S A MAR - BUR, a bluff", id="one line with remarks"),
        pytest.param("A PAR: A PAR S A MAR - BUR\nA MAR: A MAR - SPA\nF BRE: F BRE - MAO", id="unit before the order"),
        pytest.param(json.dumps(dict(zip(LEGAL.sites, WANTED[1:] + WANTED[:1], strict=True))), id="JSON"),
        pytest.param(json.dumps({"orders": WANTED})[:-2], id="broken JSON"),
        pytest.param("<think>\nA PAR H\nA MAR H\n</think>\n" + "\n".join(WANTED), id="a thought before"),
        pytest.param("A PAR - PIC\nA MAR H\nNo, better:\n" + "\n".join(WANTED), id="a second thought"),
    ],
)
def test_formatting_does_not_matter(text: str):
    orders, counts = read_answer(text, LEGAL)
    assert sorted(orders) == sorted(WANTED) and LEGAL.admits(orders)
    assert counts == AnswerCounts(answers=1, orders=3)


@pytest.mark.parametrize(
    ("text", "orders", "missing", "illegal", "unparsable"),
    [
        pytest.param("A PAR - BUR", ["F BRE H", "A MAR H", "A PAR - BUR"], 2, 0, 0, id="too few"),
        pytest.param("A PAR - MUN\nA MAR - SPA\nF BRE H", ["F BRE H", "A MAR - SPA", "A PAR H"], 1, 1, 0, id="an illegal one"),
        pytest.param("A PAR - BURMA", ["F BRE H", "A MAR H", "A PAR H"], 3, 0, 1, id="a longer name is not cut"),
        pytest.param("A PAR - BUR/PIC", ["F BRE H", "A MAR H", "A PAR H"], 3, 1, 0, id="two places"),
        pytest.param("A PAR - BUR or PIC", ["F BRE H", "A MAR H", "A PAR H"], 3, 1, 0, id="one or the other"),
        pytest.param("F PAR - BUR", ["F BRE H", "A MAR H", "A PAR H"], 3, 1, 0, id="another type of unit"),
        pytest.param("\n".join(WANTED) + "\nA MUN H", WANTED, 0, 1, 0, id="a unit of others"),
        pytest.param("", ["F BRE H", "A MAR H", "A PAR H"], 3, 0, 1, id="nothing"),
    ],
)
def test_what_is_missing_or_illegal_holds_and_is_counted(text, orders, missing, illegal, unparsable):
    found, counts = read_answer(text, LEGAL)
    assert sorted(found) == sorted(orders)
    assert counts == AnswerCounts(answers=1, orders=3, missing=missing, illegal=illegal, unparsable=unparsable)


@pytest.mark.parametrize(
    ("legal", "text", "orders", "missing", "illegal"),
    [
        pytest.param(BUILD, "F BRE B\nWAIVE", ["F BRE B", WAIVE], 0, 0, id="a build waived"),
        pytest.param(BUILD, "1. A PAR B", ["A PAR B", WAIVE], 1, 0, id="a build missing"),
        pytest.param(DISBAND, "F STP/SC D", ["A GAS D", "F STP/SC D"], 1, 0, id="the first unit goes"),
        pytest.param(DISBAND, "A GAS D\nA PAR D\nF STP(SC) D", ["A GAS D", "A PAR D"], 0, 1, id="one too many"),
        pytest.param(STP, "f stp (sc) - bot", ["F STP/SC - BOT"], 0, 0, id="a coast in brackets"),
    ],
)
def test_builds_disbands_and_coasts(legal, text, orders, missing, illegal):
    found, counts = read_answer(text, legal)
    assert found == orders and (counts.missing, counts.illegal) == (missing, illegal)


def legal_of(
    power: str, phase: str = "S1902M", *, retreats: Mapping[str, Mapping[str, Sequence[str]]] | None = None, **units: str
):
    """The legal orders of a power; units as "A PAR, F BRE" by power, and two centres fewer or more than it has."""
    own = {name.upper(): text.split(", ") if text else [] for name, text in units.items()}
    centres = {power: ["PAR", "BRE", "MAR"][: 3 if not own[power] else 2]} if phase[0] == "W" else {}
    return board_of(phase, own, retreats or {}, centres).legal_orders()[power]


ONE = legal_of("FRANCE", france="A PAR")
CONVOY = legal_of("ENGLAND", england="A LON, F NTH")
BY_CONVOY = ["A LON - BEL VIA", "F NTH C A LON - BEL"]
COAST = legal_of("FRANCE", france="F MAO, A MAR")
SOUTH = legal_of("RUSSIA", russia="F STP/SC, A FIN")
RETREAT = legal_of("FRANCE", "S1902R", england="A BUR", retreats={"FRANCE": {"A BUR": ["PAR", "GAS"]}})
BUILDS = legal_of("FRANCE", "W1901A", france="")
REMOVAL = legal_of("FRANCE", "W1901A", france="A PAR, A GAS, F MAO")
MOVES = ["F BRE - MAO", "A MAR - SPA", "A PAR - BUR"]
HOLDS = ["F BRE H", "A MAR H", "A PAR H"]
LINES = "\n".join(MOVES)
REJECTED = "A PAR - PIC\nA MAR H\nF BRE - ENG"


def cases(table: Mapping[str, tuple[LegalOrders, str, Sequence[str]]]):
    """Each: legal orders, text, the orders in it."""
    return pytest.mark.parametrize(("legal", "text", "orders"), [pytest.param(*case, id=name) for name, case in table.items()])


@cases(
    {
        "dash": (LEGAL, "A PAR \u2014 BUR \u2014 keeps Germany out\nA MAR - SPA - a build\nF BRE \u2013 MAO \u2013 west", MOVES),
        "words": (LEGAL, "A PAR - BUR because MUN attacks\nA MAR - SPA: a build\nF BRE - MAO by sea", MOVES),
        "brackets": (LEGAL, "A PAR - BUR (A PAR - PIC is weaker)\nA MAR - SPA (SC)\nF BRE - MAO", MOVES),
        "negations": (LEGAL, "A PAR - BUR, not A PAR - PIC\nA MAR - SPA instead of A MAR H\nF BRE - MAO", MOVES),
        "a table's last column": (
            LEGAL,
            "| Unit | Order | Why |\n|---|---|---|\n| A PAR | A PAR - BUR | A PAR H is weak |\n" + LINES,
            MOVES,
        ),
        "the next move": (ONE, "A PAR - BUR - Munich is next", ["A PAR - BUR"]),
        "struck out": (ONE, "~~A PAR - PIC~~ A PAR - BUR", ["A PAR - BUR"]),
    }
)
def test_a_remark_is_no_order(legal, text, orders):
    assert sorted(read_answer(text, legal)[0]) == sorted(orders)


@cases(
    {
        "a dash of its own": (CONVOY, "A LON \u2011 YOR\nF NTH \u2212 NWY", ["A LON - YOR", "F NTH - NWY"]),
        "full width": (LEGAL, "\uff21 \uff30\uff21\uff32 \uff0d \uff22\uff35\uff32\nA MAR - SPA\nF BRE - MAO", MOVES),
        "entities and breaks": (LEGAL, "A PAR -&gt; BUR<br>A MAR &rarr; SPA<br/>F BRE &mdash; MAO", MOVES),
        "TeX": (LEGAL, "A PAR $\\rightarrow$ BUR\nA MAR $\\to$ SPA\nF BRE \\rightarrow MAO", MOVES),
        "sentences": (
            LEGAL,
            "The army in Paris moves to Burgundy, the Marseilles army goes to Spain. Brest to Mid-Atlantic.",
            MOVES,
        ),
        "unit and goal": (LEGAL, "A PAR: BUR\n**A MAR** \u2013 Spain\nF BRE MAO", MOVES),
        "in a sentence": (LEGAL, "For spring I think A PAR - BUR, A MAR - SPA and F BRE - MAO work well.", MOVES),
        "DAIDE": (LEGAL, "(FRA AMY PAR) MTO BUR\n(FRA AMY MAR) MTO SPA\n(FRA FLT BRE) MTO MAO", MOVES),
        "carriage returns": (LEGAL, LINES.replace("\n", "\r"), MOVES),
        "a fence with the first order": (LEGAL, f"```{LINES}```", MOVES),
        "letters as numbers": (LEGAL, "(a) A PAR - BUR\n(b) A MAR - SPA\n(c) F BRE - MAO", MOVES),
        "nobody's type": (LEGAL, "PAR - BUR\nA MAR S PAR - BUR\nBRE-MAO", ["F BRE - MAO", "A MAR S A PAR - BUR", "A PAR - BUR"]),
        "a support to hold": (CONVOY, "A LON H\nF NTH supports A LON to hold", ["A LON H", "F NTH S A LON"]),
        "no VIA": (CONVOY, "A LON - BEL\nF NTH C A LON - BEL", BY_CONVOY),
        "by convoy": (CONVOY, "London to Belgium by convoy\nThe North Sea convoys London to Belgium", BY_CONVOY),
        "the route": (CONVOY, "A LON - NTH - BEL\nF NTH C A LON - BEL VIA", BY_CONVOY),
        "a coast too many": (
            COAST,
            "A MAR S F MAO - SPA/NC\nF MAO - Spain (north coast)",
            ["F MAO - SPA/NC", "A MAR S F MAO - SPA"],
        ),
        "two coasts are possible": (COAST, "F MAO - SPA\nA MAR - SPA/SC", ["F MAO H", "A MAR - SPA"]),
        "no coast": (SOUTH, "F STP - BOT\nA FIN S F STP", ["F STP/SC - BOT", "A FIN S F STP/SC"]),
        "another coast": (SOUTH, "F STP/NC - BOT\nA FIN H", ["F STP/SC H", "A FIN H"]),
        "a retreat as a move": (RETREAT, "A BUR - GAS", ["A BUR R GAS"]),
        "retreats to": (RETREAT, "Army Burgundy RETREATS TO Gascony", ["A BUR R GAS"]),
        "build": (BUILDS, "A PAR BUILD\nBuild a fleet in Brest\nI waive the third", ["A PAR B", "F BRE B", WAIVE]),
        "builds": (BUILDS, "Builds:\n- A PAR\n- F BRE\n- A MAR", ["A PAR B", "F BRE B", "A MAR B"]),
        "remove": (REMOVAL, "Remove the fleet in the Mid-Atlantic Ocean", ["F MAO D"]),
        "keep": (REMOVAL, "A PAR: keep\nA GAS: keep\nF MAO: disband", ["F MAO D"]),
    }
)
def test_an_order_is_the_one_legal_order_that_its_words_mean(legal, text, orders):
    assert sorted(read_answer(text, legal)[0]) == sorted(orders)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"A PAR": "BUR", "A MAR": "- SPA", "F BRE": "move to MAO"}, id="goal by unit"),
        pytest.param(dict.fromkeys(MOVES, "because"), id="orders as keys"),
        pytest.param([{"unit": move[:5], "order": "MOVE", "to": move[8:], "why": "A PAR H"} for move in MOVES], id="objects"),
        pytest.param(
            [{"to": m[8:], "from": m[2:5], "type": "army" if m[0] == "A" else "fleet"} for m in MOVES], id="types, from, to"
        ),
        pytest.param({m[:5]: {"action": "move", "destination": m[8:]} for m in MOVES}, id="objects by unit"),
        pytest.param({"orders": MOVES, "alternatives": REJECTED.split("\n")}, id="alternatives after"),
        pytest.param({"reasoning": REJECTED, "orders": MOVES}, id="a reason before"),
        pytest.param({"arguments": json.dumps({"orders": MOVES})}, id="JSON in JSON"),
    ],
)
@pytest.mark.parametrize("form", ["{}", "```json {} ```", "Sure: {} Good luck!"])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_of_any_shape_is_read(value, form, indent):
    assert sorted(read_answer(form.format(json.dumps(value, indent=indent)), LEGAL)[0]) == sorted(MOVES)


def test_fields_are_read_as_objects_are():
    text = "".join(f"- unit: {move[:5]}\n  action: move\n  target: {move[8:]}\n" for move in MOVES)
    assert sorted(read_answer("orders:\n" + text, LEGAL)[0]) == sorted(MOVES)


@pytest.mark.parametrize(
    ("opening", "closing"), [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<Thinking>", "</Thinking>")]
)
def test_a_thought_is_no_answer(opening: str, closing: str):
    def orders(text: str) -> list[str]:
        return sorted(read_answer(text, LEGAL)[0])

    unfinished, counts = read_answer(f"{opening}\n{REJECTED}\nNo, A MAR must", LEGAL)
    assert unfinished == HOLDS and counts.unparsable == 1 and counts.missing == 3
    assert orders(f"{LINES}\n{opening}{REJECTED}") == orders(f"{opening}{REJECTED}{closing}{LINES}") == sorted(MOVES)
    assert orders(f"{REJECTED}{closing}{LINES}") == sorted(MOVES), "the prompt opened it"
    assert orders(f"{opening}x{closing}{LINES}{opening}{REJECTED}{closing}") == sorted(MOVES)


@pytest.mark.parametrize(
    ("text", "orders"),
    [
        pytest.param(f"Let me think.\n{REJECTED}\nNo, A MAR must", HOLDS, id="perhaps a thought"),
        pytest.param(f"Let me think.\n{REJECTED}</think>\n{LINES}\nI have", MOVES, id="a thought has ended"),
        pytest.param(f"{LINES}\n\nI have chosen these because", MOVES, id="orders first"),
        pytest.param(json.dumps({"orders": MOVES})[:-2], [*MOVES[:2], "A PAR H"], id="the last may lack its end"),
        pytest.param("A MAR - SPA\nA PAR S A MAR", ["F BRE H", "A MAR - SPA", "A PAR H"], id="half an order"),
    ],
)
def test_of_an_answer_that_is_cut_off_only_what_is_surely_meant_counts(text, orders):
    assert sorted(read_answer(text, LEGAL, cut_off=True)[0]) == sorted(orders)


@pytest.mark.parametrize(
    ("legal", "text", "orders"),
    [
        pytest.param(LEGAL, f"{LINES}\n\nAlternatives I rejected: A PAR - PIC, F BRE - ENG", MOVES, id="alternatives"),
        pytest.param(LEGAL, f"{LINES}\n\nAlternatives I rejected:\n{REJECTED}", MOVES, id="a whole set of alternatives"),
        pytest.param(LEGAL, f"Options:\n{REJECTED}\n\n{LINES}", MOVES, id="options before"),
        pytest.param(LEGAL, f"{LINES}\n\nNext turn:\n{REJECTED}", MOVES, id="plans"),
        pytest.param(LEGAL, f"{LINES}\nA PAR - PIC", MOVES, id="one order more"),
        pytest.param(LEGAL, f"{REJECTED}\n\nOn reflection:\n{LINES}", MOVES, id="a second set"),
        pytest.param(LEGAL, f"{REJECTED}\n{LINES}", MOVES, id="a second set at once"),
        pytest.param(LEGAL, f"I rejected A PAR - PIC, F BRE - ENG.\n{LINES}", MOVES, id="a sentence before"),
        pytest.param(LEGAL, f"I thought of alternatives before writing this down:\n{LINES}", MOVES, id="nothing else is there"),
        pytest.param(ONE, "A PAR - BUR\n\nAlternatives I rejected: A PAR - PIC", ["A PAR - BUR"], id="one unit"),
        pytest.param(ONE, "A PAR - PIC would be bad.\nA PAR - BUR\nA PAR H?", ["A PAR - BUR"], id="doubts"),
        pytest.param(ONE, "I will not order A PAR - PIC.", ["A PAR H"], id="a negation alone"),
    ],
)
def test_the_last_complete_set_that_is_given_counts(legal, text, orders):
    assert sorted(read_answer(text, legal)[0]) == sorted(orders)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\n".join(f"{move}\nReason: it is safe" for move in MOVES), id="reasons"),
        pytest.param("\n".join(f"- order: {move}\n  rationale: it is safe" for move in MOVES), id="YAML"),
        pytest.param(f"{MOVES[0]}\nIf Italy waits, Spain is ours\n{MOVES[1]}\n{MOVES[2]}", id="a sentence"),
        pytest.param(f"First:\n{MOVES[0]}\nNext:\n{MOVES[1]}\n\nOther units:\n{MOVES[2]}", id="headings"),
    ],
)
def test_a_heading_rejects_no_order_of_a_unit_without_another(text: str):
    found, counts = read_answer(text, LEGAL)
    assert sorted(found) == sorted(MOVES) and counts == AnswerCounts(answers=1, orders=3)


def test_a_rejected_order_takes_no_place_of_a_missing_or_illegal_order_or_a_build():
    assert read_answer("A PAR - SPA\nA MAR - SPA\n\nRejected:\nA PAR - PIC", LEGAL)[1].missing == 2
    for heading in ("Rejected", "Moves to avoid", "I discarded the attack"):
        found, counts = read_answer(f"A MAR - SPA\nF BRE - MAO\n\n{heading}:\nA PAR - BUR", LEGAL)
        assert (found, counts.missing) == (["F BRE - MAO", "A MAR - SPA", "A PAR H"], 1)
    assert read_answer("A PAR B\n\nRejected:\nF BRE B", BUILDS)[0] == ["A PAR B", WAIVE, WAIVE]
    assert read_answer("F STP/SC D\nNext:\nA PAR D", DISBAND)[0] == ["A PAR D", "F STP/SC D"]
    assert read_answer("F STP/SC D\nA PAR D\nNext year:\nA GAS D", DISBAND)[0] == ["A PAR D", "F STP/SC D"]
    rejected = "\n".join(f"{order}\nReason: weak" for order in REJECTED.split("\n"))
    assert sorted(read_answer(f"{LINES}\n\nAlternatives:\n{rejected}", LEGAL)[0]) == sorted(MOVES)


@pytest.mark.parametrize(
    "heading",
    [
        *("Backup plan", "Fallback orders", "Contingency", "Otherwise", "Plan B", "Hypothetical", "Conditional", "Unused"),
        *("Dismissed", "Not chosen", "What I did not choose"),
    ],
)
def test_a_set_below_a_heading_that_keeps_it_in_reserve_is_no_answer(heading: str):
    assert read_answer(f"My orders:\n{LINES}\n\n{heading}:\n{REJECTED}", LEGAL)[0] == list(MOVES)
    assert sorted(read_answer(f"{heading}:\n{REJECTED}", LEGAL)[0]) == sorted(REJECTED.split("\n")), "nothing else is there"


@pytest.mark.parametrize(
    "heading", ["Alternative: the north", "Rejected: it leaves Burgundy open", "Option 2 (risky): the north"]
)
def test_a_label_with_a_remark_rejects_the_orders_below_it(heading: str):
    assert sorted(read_answer(f"{LINES}\n\n{heading}\n{REJECTED}", LEGAL)[0]) == sorted(MOVES)


@cache
def decisions() -> list[list[LegalOrders]]:
    """Legal orders by kind, of games that began with many fleets at sea."""
    found: dict[OrderKind, list[LegalOrders]] = {}
    for seed in range(12):
        rng = random.Random(seed)
        board = Board.restore(convoy_heavy(rng)).fork()
        for _ in range(12):
            asked = board.legal_orders()
            for legal in asked.values():
                found.setdefault(legal.kind, []).append(legal)
            board.step({power: [rng.choice(o) for o in legal.options][: legal.picks] for power, legal in asked.items()})
    assert found.keys() == set(OrderKind)
    return [found[kind] for kind in OrderKind]


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_any_legal_set_in_any_style_is_read_back(seed: int):
    rng = random.Random(seed)
    legal = rng.choice(rng.choice(decisions()))
    ordered = rng.randint(0, min(legal.picks, len(legal.sites))) if legal.kind is OrderKind.BUILD else legal.picks
    orders = [rng.choice(legal.options[site]) for site in rng.sample(range(len(legal.sites)), ordered)]
    orders += [WAIVE] * (legal.picks - ordered)
    text = Writer(legal, rng).answer(orders)
    found, counts = read_answer(text, legal)
    assert sorted(found) == sorted(orders), text
    assert counts == AnswerCounts(answers=1, orders=legal.picks), text


@pytest.mark.parametrize("legal", [LEGAL, BUILD, DISBAND, STP], ids=["movement", "build", "disband", "coast"])
def test_any_text_gives_a_legal_set(legal: LegalOrders):
    pieces = [order for options in legal.options for order in options] + [
        "WAIVE",
        "\n",
        ",",
        '{"',
        "[",
        "- ",
        "A PAR",
        "/",
        "```",
    ]

    @given(st.lists(st.sampled_from(pieces) | st.text(max_size=6), max_size=20).map(" ".join) | st.text())
    def check(text: str) -> None:
        orders, counts = read_answer(text, legal)
        assert legal.admits(orders) and 0 <= counts.missing <= counts.orders == legal.picks

    check()
    assert legal.admits(no_answer(legal)[0])


@pytest.mark.parametrize(
    "text",
    [" " * 50_000, "-" * 50_000, "A " * 25_000, "[" * 50_000, '"' * 50_000, "\\" * 50_000, "{" * 50_000],
    ids=lambda text: text[0],
)
def test_long_nonsense_takes_no_time(text: str):
    """A pattern that backtracks would take minutes here."""
    assert read_answer(text, LEGAL)[1].unparsable == 1


def test_the_question_names_power_position_and_every_legal_order():
    board = Board.start()
    for power, legal in board.legal_orders().items():
        asked = messages(board, legal)[1]["content"]
        listed = asked.split("\n")
        assert f"{power} MOVEMENT {' '.join(legal.sites)}" in asked and "SPRING 1901" in asked
        assert all(order in listed for options in legal.options for order in options)
