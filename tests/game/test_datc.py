"""The engine's own DATC cases played on our boards, also after the position was frozen and restored.

The cases come from the installed package. Only making a game, giving orders and playing a phase are replaced: orders go through
`Board.step`, which accepts legal orders and counts the others.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from diplomacy.tests import test_datc as package
from diplomacy.utils.order_results import DISBAND, VOID

from entente.game import adjudicator, plain
from entente.game.board import Board, BoardPath
from entente.game.plain import PlainGame

Cases = package.TestDATC
NAMES = sorted(name for name in vars(Cases) if name.startswith("test_"))


class Table:
    """Replaces the game of a case: a board, the orders given so far, and the results in the engine's form."""

    def __init__(self, path: BoardPath, restored: bool) -> None:
        self.board, self._path, self._restored = Board.start(path=path), path, restored
        self.given: dict[str, list[str]] = {}
        self.refused: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.board._game, name)

    def get_order_status(self, unit: str) -> list[Any]:
        """Replaces the engine's method, which needs a history that the fast path does not keep."""
        return list(self.result_history.last_value().get(unit, []))

    def play(self) -> None:
        assert self.get_hash() == self.rebuild_hash()
        self.board._enter_phase()  # the case has set units and phase directly in the game
        if self._restored:
            self.board = Board.restore(self.board.snapshot(game_id="datc", seed=0, source="test"), self._path)
        orders = {power: self._spelled_as_listed(power, texts) for power, texts in self.given.items()}
        self.given = {}
        played = self.board.step(orders)
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


def played_at(path: BoardPath, restored: bool, results: list[Mapping[str, Any]]) -> type:
    """The package's cases with a `Table` instead of a game."""

    class History:
        @staticmethod
        def last_value() -> Mapping[str, Any]:
            return results[-1]

    class Ours(Cases):
        @staticmethod
        def create_game() -> Table:
            table = Table(path, restored)
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
    for path, restored in ((BoardPath.FAST, False), (BoardPath.FAST, True), (BoardPath.PLAIN, True)):
        getattr(played_at(path, restored, results)(), case)()


def test_every_case_is_found() -> None:
    assert len(NAMES) >= 150
