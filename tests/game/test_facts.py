"""Facts of the map: against plain loops over the engine's own adjacency, in every kind of phase."""

from collections.abc import Iterator

import pytest

from game.adjudicator import new_game
from game.board import POWERS, Board
from game.geography import geography
from game.legal import LegalOrders, OrderKind
from game.prompt_settings import PromptSettings
from game.prompts import power_text, rules_text

Standing = dict[str, tuple[str, str]]
"""Per province, who is named there, or '', and the unit there, or ''."""
MAP = new_game("standard").map
LOCATIONS = sorted({location.upper() for location in MAP.locs})


def near(unit: str) -> set[str]:
    """The provinces that the engine lets the unit move to."""
    return {goal[:3] for goal in LOCATIONS if MAP.abuts(unit[0], unit[2:], "-", goal)}


def standing(board: Board, power: str, place: str) -> tuple[str, str]:
    for other, units in board.units().items():
        for unit in units:
            if unit[2:5] == place:
                return ("" if other == power else other), unit
    for other, centres in board.centres().items():
        if place in centres and other != power:
            return other, ""
    return ("FREE" if place in board.free_centres() else ""), ""


def read(words: list[str]) -> dict[str, tuple[str, str]]:
    """Places of a line of neighbours, each once, with who is named before it and the unit's type there."""
    found, holder, kind = {}, "", ""
    for word in words:
        if word in (*POWERS, "FREE"):
            holder = word
        elif word in ("A", "F"):
            kind = word
        else:
            assert word[:3] not in {place[:3] for place in found}
            found[word] = holder, f"{kind} {word}" if kind else ""
            kind = ""
    return found


def lines_of(own: LegalOrders, board: Board, facts: str, **given: str) -> list[str]:
    settings = PromptSettings.model_validate({"facts": facts, **given})
    return power_text(own, board, settings).splitlines()[1:-1]


def turns(self_play) -> Iterator[tuple[Board, str, LegalOrders]]:
    for seed in (4,):
        for board, legal, _ in self_play(seed, phases=30):
            yield from ((board, power, own) for power, own in legal.items())


def test_neighbours_are_where_a_unit_may_go_and_what_is_there(self_play) -> None:
    kinds, coasts = set(), 0
    for board, power, own in turns(self_play):
        kinds.add(own.kind)
        for site, options, line in zip(own.sites, own.options, lines_of(own, board, "neighbours"), strict=True):
            words = line.removeprefix(f"{site} ").split()
            if own.kind is OrderKind.RETREAT:
                assert words.pop(0) == "R"
                goals = set(board.dislodged()[power][site])
                assert set(read(words)) == goals  # an answer names the coast
            else:
                built = {order.removesuffix(" B") for order in options} if own.kind is OrderKind.BUILD else {site}
                goals = set[str]().union(*map(near, built))
            if own.kind is OrderKind.MOVEMENT:
                moves = [order.split() for order in options if order[len(site) :].startswith(" - ")]
                assert goals == {move[3][:3] for move in moves if move[-1] != "VIA"}
            found = read(words)
            coasts += any("/" in unit for _, unit in found.values())
            assert {place[:3]: shown for place, shown in found.items()} == {
                goal[:3]: standing(board, power, goal[:3]) for goal in goals
            }
    assert kinds == set(OrderKind) and coasts


def test_threats_are_all_that_can_come_and_goals_all_that_can_be_reached(self_play) -> None:
    kinds, largest = set(), 0
    for board, power, own in turns(self_play):
        kinds.add(own.kind)
        units, centres = board.units(), board.centres()
        threatened, reached = [], {}
        for place in sorted({*centres[power], *(unit[2:5] for unit in units[power])}):
            comers = [[other, *(unit[2:5] for unit in units[other] if place in near(unit))] for other in POWERS if other != power]
            if words := [word for each in comers if len(each) > 1 for word in each]:
                threatened.append(" ".join([place, *words]))
        for centre in sorted(geography().centres - set(centres[power])):
            reached[centre] = sum(centre in near(unit) for unit in units[power])
        wanted = ["THREATS " + ", ".join(threatened)] if threatened else []
        if largest_here := max(reached.values()):
            largest = max(largest, largest_here)
            counts = sorted({count for count in reached.values() if count})
            wanted.append(
                " ".join(["REACH", *(f"{n} " + " ".join(c for c, times in reached.items() if times == n) for n in counts)])
            )
        assert lines_of(own, board, "threats") == wanted
    assert kinds == set(OrderKind) and largest > 1


def test_what_only_a_convoy_reaches_is_no_fact() -> None:
    board = Board.start()
    board.step({"ENGLAND": ["F LON - ENG", "A LVP - WAL"]})
    legal = board.legal_orders()
    (wales,) = [
        options for site, options in zip(legal["ENGLAND"].sites, legal["ENGLAND"].options, strict=True) if site == "A WAL"
    ]
    assert "A WAL - BRE VIA" in wales
    assert lines_of(legal["ENGLAND"], board, "neighbours")[-1] == "A WAL LON LVP YOR"
    assert lines_of(legal["FRANCE"], board, "threats")[0] == "THREATS BRE ENGLAND ENG"


@pytest.mark.parametrize("facts", ["neighbours", "threats"])
def test_facts_are_the_last_lines_and_join_cleanly_with_every_way_of_listing_orders(self_play, facts: str) -> None:
    """All else of a prompt stays, except that lines of neighbours name the sites where nothing else would."""
    for board, power, own in turns(self_play):
        for listed in ("none", "factored", "lines"):
            for notation in ("full", "slot"):
                given = {"legal_orders": listed, "order_notation": notation}
                plain, shown = lines_of(own, board, "none", **given), lines_of(own, board, facts, **given)
                text = power_text(own, board, PromptSettings.model_validate({"facts": facts, **given}))
                assert shown[: len(plain)] == plain and len(shown) >= len(plain)
                assert text.startswith(f"{power} ") and not any(bad in text for bad in ("  ", " \n", "\n ", "\n\n"))
    assert len(rules_text(PromptSettings.model_validate({"facts": facts})).splitlines()) == 2
