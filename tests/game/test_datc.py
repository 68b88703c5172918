"""The DATC's cases played on our boards, also after the position was frozen and restored.

The cases of version 2.5 come from the installed package. Only making a game, giving orders and playing a phase are replaced:
orders go through `Board.step`, which accepts legal orders and counts the others. What version 3.0 changed or added, and kin of
its cases that the package judges otherwise, are in tables. The second adjudicator judges each movement phase as well.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from diplomacy.tests import test_datc as package
from diplomacy.utils.order_results import DISBAND, VOID

from entente.game import adjudicator, plain
from entente.game.board import Board
from entente.game.plain import PlainGame, plain_board
from entente.game.positions import board_of
from entente.game.snapshot import Snapshot
from tests.game.second_adjudicator import assert_judged_alike, table_of

Cases = package.TestDATC
Restore = Callable[[Snapshot], Board]
CHANGED = {
    "test_6_g_8": "a move VIA convoy falls back to land",
    "test_6_j_3": "distances are counted to home centres",
    "test_6_j_5": "distances are counted to home centres",
    "test_6_j_6": "distances are counted to home centres",
    "test_6_j_7": "distances are counted to home centres",
    "test_6_k_1": "not of the DATC; distances are counted to home centres",
}
"""Cases of the package that say what the rulebook of 2023 and the DATC 3.0 no longer say, and what that is."""
NAMES = sorted({name for name in vars(Cases) if name.startswith("test_")} - CHANGED.keys())


class Table:
    """Replaces the game of a case: a board, the orders given so far, and the results in the engine's form."""

    def __init__(self, start: Callable[[], Board], restore: Restore | None) -> None:
        self.board, self._restore = start(), restore
        self.given: dict[str, list[str]] = {}
        self.refused: set[str] = set()
        self.command: set[str] = set()
        self.ordered_units: dict[str, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.board._game, name)

    def get_order_status(self, unit: str) -> list[Any]:
        """Replaces the engine's method, which needs a history that the fast path does not keep."""
        return list(self.result_history.last_value().get(unit, []))

    def play(self) -> None:
        assert self.get_hash() == self.rebuild_hash()
        self.board._enter_phase()  # the case has set units and phase directly in the game
        if self._restore is not None:
            self.board = self._restore(self.board.snapshot(game_id="datc", seed=0, source="test"))
        orders = {power: self._spelled_as_listed(power, texts) for power, texts in self.given.items()}
        self.given = {}
        self.command = {unit for own in self.board.units().values() for unit in own}
        before = self.board.units()
        played = self.board.step(orders)
        if played.phase.endswith("M"):
            assert_judged_alike(table_of(before, played.orders), self.board)
        self.ordered_units = {power: [" ".join(text.split()[:2]) for text in texts] for power, texts in played.orders.items()}
        refused = {power: Counter(texts) - Counter(played.orders[power]) for power, texts in orders.items()}
        assert played.rejected == {power: texts.total() for power, texts in refused.items()}
        self.refused = {" ".join(text.split()[:2]) for texts in refused.values() for text in texts}
        assert self.get_hash() == self.rebuild_hash()

    def _spelled_as_listed(self, power: str, texts: Sequence[str]) -> list[str]:
        """Each order as our legal lists spell it: parsed by the engine, without the coast of a supported move's target."""
        own = self.board.legal_orders().get(power)
        listed = {order for options in own.options for order in options} if own is not None else set()
        found = []
        for text in texts:
            reader = PlainGame()
            reader.set_state(self.get_state())
            reader.set_orders(power, text)
            parsed = reader.get_orders(power)
            order = next((order for order in parsed if not order.startswith("VOID")), text)
            spellings = (order, f"{order} VIA", order[:-3] if order[-3:-2] == "/" else order)
            found.append(next((spelling for spelling in spellings if spelling in listed), order))
        return found


def played_at(start: Callable[[], Board], restore: Restore | None, results: list[Mapping[str, Any]]) -> type:
    """The package's cases with a `Table` instead of a game."""

    class History:
        @staticmethod
        def last_value() -> Mapping[str, Any]:
            return results[-1]

    class Ours(Cases):
        @staticmethod
        def create_game() -> Table:
            table = Table(start, restore)
            table.result_history = History
            return table

        @staticmethod
        def set_orders(game: Table, power_name: str, orders: str | list[str]) -> None:
            texts = [orders] if isinstance(orders, str) else orders
            game.given.setdefault(power_name, []).extend(text for text in texts if text)

        @staticmethod
        def process(game: Table) -> None:
            game.play()

        @staticmethod
        def check_results(game: Table, unit: str, value: Any, phase: str = "M") -> bool:
            # The engine accepts such an order and marks it void; a board rejects and counts it.
            marks = value if isinstance(value, list) else [value]
            if phase == "M" or VOID not in marks or unit not in game.refused:
                return Cases.check_results(game, unit, value, phase)
            left = [mark for mark in marks if mark != VOID]
            return [mark for mark in results[-1].get(unit, []) if mark != DISBAND] == left

    return Ours


@pytest.mark.parametrize("case", NAMES)
def test_the_packages_cases_come_out_as_they_say(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Mapping[str, Any]] = []
    in_words = adjudicator.marks_by_unit
    for module in (adjudicator, plain):
        monkeypatch.setattr(module, "marks_by_unit", lambda found: results.append(found) or in_words(found))
    for start, restore in ((Board.start, None), (Board.start, Board.restore), (plain_board, plain_board)):
        getattr(played_at(start, restore, results)(), case)()


def test_every_case_is_found() -> None:
    assert len(NAMES) >= 145 and CHANGED.keys() <= vars(Cases).keys()


MOVEMENT = {
    "6.B.15 a support may leave out the coast": {
        "FRANCE": ["F POR S F MAO - SPA"],
        "ENGLAND": ["F MAO - SPA/NC: bounce"],
        "ITALY": ["F LYO S F WES - SPA", "F WES - SPA/SC: bounce"],
    },
    "6.C.8 a disrupted circle with an own unit ahead": {
        "TURKEY": ["F CON - BLA: bounce", "A BUL - CON: bounce", "A SMY S A BUL - CON: void"],
        "RUSSIA": ["F BLA - BUL/EC: bounce"],
        "AUSTRIA": ["A SER - BUL: bounce"],
    },
    "6.C.9 a disrupted circle with help against an own unit": {
        "TURKEY": ["F CON - BLA: bounce", "A SMY S A BUL - CON: void"],
        "RUSSIA": ["F BLA - BUL/EC: bounce"],
        "AUSTRIA": ["A SER - BUL: bounce", "A BUL - CON: bounce"],
    },
    "6.D.12 by convoy: own support does not dislodge": {
        "ENGLAND": ["A LON - BEL VIA: bounce", "F NTH C A LON - BEL"],
        "FRANCE": ["A BEL H", "A PIC S A LON - BEL: void"],
    },
    "6.D.12 with two supports, one of them foreign": {
        "ENGLAND": ["A LON - BEL VIA", "F NTH C A LON - BEL", "A HOL S A LON - BEL"],
        "FRANCE": ["A BEL H: dislodged", "A PIC S A LON - BEL: void"],
    },
    "6.F.4 with 6.D.12: a fleet that its own power attacks convoys": {
        "ENGLAND": ["A LON - NWY VIA", "F NTH C A LON - NWY", "F EDI S F HEL - NTH: void"],
        "GERMANY": ["F HEL - NTH: bounce"],
    },
    "6.F.4 with 6.D.12 where the own fleet itself attacks": {
        "ENGLAND": ["A LON - NWY VIA", "F NTH C A LON - NWY", "F EDI - NTH: bounce"],
        "GERMANY": ["F HEL S F EDI - NTH"],
    },
    "6.F.6 a convoy whose routes share the lost fleet cuts no support": {
        "ENGLAND": [
            "A WAL - SPA VIA: no convoy",
            "F ENG C A WAL - SPA: no convoy",
            "F IRI C A WAL - SPA: no convoy",
            "F MAO C A WAL - SPA: dislodged",
        ],
        "ITALY": ["F WES - MAO", "F NAF S F WES - MAO"],
        "FRANCE": ["A SPA S A MAR", "A MAR H"],
        "GERMANY": ["A BUR - MAR: bounce", "A PIE S A BUR - MAR"],
    },
    "6.F.8 a convoy whose routes share the lost fleet bounces nobody": {
        "ENGLAND": [
            "A WAL - SPA VIA: no convoy",
            "F ENG C A WAL - SPA: no convoy",
            "F IRI C A WAL - SPA: no convoy",
            "F MAO C A WAL - SPA: dislodged",
        ],
        "ITALY": ["F WES - MAO", "F NAF S F WES - MAO"],
        "FRANCE": ["A MAR - SPA"],
    },
    "6.F.9 a convoy whose other route is whole cuts support": {
        "ENGLAND": ["A WAL - BRE VIA: bounce", "F ENG C A WAL - BRE", "F IRI C A WAL - BRE", "F MAO C A WAL - BRE: dislodged"],
        "ITALY": ["F WES - MAO", "F NAF S F WES - MAO"],
        "FRANCE": ["A BRE S A PAR: cut", "A PAR H: dislodged"],
        "GERMANY": ["A BUR - PAR", "A GAS S A BUR - PAR"],
    },
    "6.F.25 a support that is cut last": {
        "GERMANY": [
            "A RUH - BEL: bounce",
            "A HOL S A RUH - BEL: cut,dislodged",
            "A DEN - NWY VIA",
            "F SKA C A DEN - NWY",
            "A FIN S A DEN - NWY",
        ],
        "ENGLAND": ["A YOR - HOL VIA", "F NTH C A YOR - HOL", "F HEL S A YOR - HOL", "A BEL H"],
        "RUSSIA": ["F NWG - NTH: bounce", "F NWY S F NWG - NTH: cut,dislodged", "F SWE - SKA: bounce"],
    },
    "6.G.3 a foreign fleet does not take an army along": {
        "FRANCE": ["F BRE - ENG", "A PIC - BEL", "A BUR S A PIC - BEL", "F MAO S F BRE - ENG"],
        "ENGLAND": ["F ENG C A PIC - BEL: no convoy,void,dislodged"],
    },
    "6.G.8 a convoy that is not there (contested: 2.5 fell back to land)": {
        "FRANCE": ["A BEL - HOL VIA: no convoy"],
        "ENGLAND": ["F NTH - HEL", "A HOL - KIE"],
    },
    "6.G.11 an adjacent convoy in a paradox (contested: 2.5 went by land)": {
        "ENGLAND": ["F NWY S F NTH - SKA", "F NTH - SKA"],
        "RUSSIA": ["A SWE - NWY VIA: no convoy", "F SKA C A SWE - NWY: dislodged", "F BAR S A SWE - NWY: no convoy"],
    },
    "6.G.11 without VIA, by an own fleet": {
        "ENGLAND": ["F NWY S F NTH - SKA", "F NTH - SKA"],
        "RUSSIA": ["A SWE - NWY: no convoy", "F SKA C A SWE - NWY: dislodged", "F BAR S A SWE - NWY: no convoy"],
    },
    "6.G.19 an unnecessary fleet shows no intent": {
        "FRANCE": ["A MAR - SPA: bounce", "F WES C A MAR - SPA: rejected"],
        "ITALY": ["F LYO C A MAR - SPA: no convoy,void", "A SPA - MAR: bounce"],
    },
    "6.G.20 an adjacent convoy that is disrupted (contested: land as a way out)": {
        "FRANCE": ["F BRE - ENG", "A PIC - BEL VIA: no convoy", "A BUR S A PIC - BEL: no convoy", "F MAO S F BRE - ENG"],
        "ENGLAND": ["F ENG C A PIC - BEL: dislodged"],
    },
    "6.G.20 without VIA, by an own fleet": {
        "FRANCE": ["F ENG C A PIC - BEL: dislodged", "A PIC - BEL: no convoy", "A BUR S A PIC - BEL: no convoy"],
        "ENGLAND": ["F LON - ENG", "F WAL S F LON - ENG"],
    },
}
"""Case -> power -> its orders, each with the marks that it gets, or "rejected" for an order that is not legal."""


@pytest.mark.parametrize("restore", [Board.restore, plain_board], ids=["fast", "plain"])
@pytest.mark.parametrize("case", MOVEMENT)
def test_cases_of_version_3_and_their_kin(case: str, restore: Restore) -> None:
    orders, expected, rejected = {}, {}, Counter()
    for power, lines in MOVEMENT[case].items():
        for order, _, marks in (line.partition(": ") for line in lines):
            unit = order[: 8 if "/" in order[:6] else 5]
            orders.setdefault(power, []).append(order)
            rejected[power] += marks == "rejected"
            expected[unit] = () if marks in ("", "rejected") else tuple(marks.split(","))
    units = {power: [order[: 8 if "/" in order[:6] else 5] for order in own] for power, own in orders.items()}
    board = restore(board_of("S1902M", units, {}, {}).snapshot(game_id="datc", seed=0, source="test"))
    played = board.step(orders)
    assert played.results == expected
    assert played.rejected == rejected
    assert_judged_alike(table_of(units, played.orders), board)


@pytest.mark.parametrize("restore", [Board.restore, plain_board], ids=["fast", "plain"])
@pytest.mark.parametrize(
    ("power", "centres", "units", "ordered", "removed"),
    [
        pytest.param("RUSSIA", ["STP"], ["A LVN", "A SWE"], [], {"A SWE"}, id="6.J.3"),
        pytest.param("RUSSIA", ["MOS"], ["A LVN", "A UKR"], [], {"A LVN"}, id="6.J.4"),
        pytest.param("RUSSIA", ["STP"], ["F SKA", "F BER"], [], {"F BER"}, id="6.J.5"),
        pytest.param("RUSSIA", ["MUN"], ["F BOT", "F NTH"], [], {"F BOT"}, id="6.J.6"),
        pytest.param("RUSSIA", ["STP", "WAR"], ["A BOH", "F SKA", "F NTH"], [], {"F NTH"}, id="6.J.7"),
        pytest.param("RUSSIA", ["WAR"], ["A TYR", "F BAL"], [], {"A TYR"}, id="6.J.8"),
        pytest.param("RUSSIA", ["STP", "SEV"], ["A GRE", "A SEV", "F BAL"], [], {"A GRE"}, id="6.J.9, south coast"),
        pytest.param("RUSSIA", ["STP", "SEV"], ["A GRE", "A SEV", "F SKA"], [], {"A GRE"}, id="6.J.9, north coast"),
        pytest.param("ITALY", ["NAP"], ["A GRE", "A PIE"], [], {"A PIE"}, id="6.J.10"),
        pytest.param("ITALY", ["WAR"], ["A WAR", "A TUS"], [], {"A TUS"}, id="6.J.11"),
        pytest.param("RUSSIA", ["STP"], ["A LVP", "A LVN", "A NWY"], ["A NWY D"], {"A NWY", "A LVP"}, id="beside an order"),
        pytest.param("RUSSIA", ["EDI"], ["A LVP", "F YOR"], [], {"F YOR"}, id="a fleet before an army"),
        pytest.param("ENGLAND", ["EDI", "MOS"], ["A LVN", "A LVP", "A EDI"], [], {"A LVP"}, id="by name, not by abbreviation"),
        pytest.param("ENGLAND", [], ["A LVN", "F LON"], [], {"A LVN", "F LON"}, id="without a centre"),
    ],
)
def test_owed_disbands_follow_the_rulebook_of_2023(
    power: str, centres: list[str], units: list[str], ordered: list[str], removed: set[str], restore: Restore
) -> None:
    position = board_of("W1901A", {power: units}, {}, {power: centres, "TURKEY": ["SMY"]})
    board = restore(position.snapshot(game_id="datc", seed=0, source="test"))
    board.step({power: ordered})
    assert set(units) - set(board.units()[power]) == removed
