"""The fast path adjudicates as the unchanged engine where both follow the rules; copies continue exactly as the original."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import diplomacy
import pytest

from entente.game.board import Board
from entente.game.plain import PackageGame, plain_board
from entente.game.snapshot import Snapshot


def state_of(game: diplomacy.Game) -> dict[str, Any]:
    """The engine's state, and the flags that its state leaves out."""
    state = game.get_state()
    del state["timestamp"]
    flags = {name: (power.order_is_set, power.wait, power.goner) for name, power in game.powers.items()}
    return {
        **state,
        "flags": flags,
        "dislodged": dict(game.dislodged),
        "popped": list(game.popped),
        "outcome": list(game.outcome),
    }


def freeze_board(board: Board) -> Snapshot:
    return board.snapshot(game_id="game", seed=0, source="test")


def comes_out_otherwise(board: Board, orders: Mapping[str, Sequence[str]], dropped: float) -> bool:
    """True where our rules may differ from the package's: convoys, retreats to a coast, disbands that nobody ordered."""
    texts = [order for own in orders.values() for order in own]
    if board.phase_type == "A":
        return dropped > 0
    return any("/" in text if board.phase_type == "R" else " C " in text or text.endswith("VIA") for text in texts)


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_phases_run_exactly_as_in_the_untouched_engine(self_play, dropped: float) -> None:
    """The engine parses orders by default and keeps full records and histories; the fast path does neither."""
    compared = Counter[str]()
    for seed in range(3):
        for board, legal, orders in self_play(seed, phases=24, dropped=dropped):
            engine, twin = plain_board(freeze_board(board), PackageGame), board.fork()
            assert state_of(engine._game) == state_of(board._game)
            assert engine.legal_orders() == legal
            if not comes_out_otherwise(board, orders, dropped):
                compared[board.phase_type] += 1
                assert twin.step(orders) == engine.step(orders)
                assert state_of(twin._game) == state_of(engine._game)
    assert min(compared.values()) > 0 and set(compared) >= ({"M"} if dropped else {"M", "R", "A"}), compared


def test_forks_and_restored_boards_play_on_exactly(self_play) -> None:
    """In every phase state and legal sets are equal before the step, and results, state and legal sets after it."""
    retreats = adjustments = 0
    for seed in range(4):
        for board, legal, orders in self_play(seed, phases=24, dropped=0.1 * (seed % 2)):
            retreats += board.phase_type == "R"
            adjustments += board.phase_type == "A"
            before = state_of(board._game)
            fork, restored, original = (
                Board(board._game.fork()),
                Board.restore(freeze_board(board)),
                board.fork(),
            )
            assert state_of(fork._game) == state_of(restored._game) == before
            assert fork.legal_orders() == restored.legal_orders() == legal
            played = original.step(orders)
            assert fork.step(orders) == restored.step(orders) == played
            assert state_of(fork._game) == state_of(restored._game) == state_of(original._game)
            assert fork.legal_orders() == restored.legal_orders() == original.legal_orders()
            assert state_of(board._game) == before, "stepping a fork changed the board it came from"
    assert retreats >= 10 and adjustments >= 20


def mutable_parts(value: Any, found: set[int]) -> set[int]:
    if type(value) in (list, set, dict):
        found.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            mutable_parts(part, found)
    return found


def slots(owner: Any) -> Iterator[tuple[str, Any]]:
    names = {name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())}
    return ((name, getattr(owner, name)) for name in names if name not in ("map", "game", "powers"))


def test_a_fork_shares_nothing_that_a_phase_changes(trieste_falls: Board) -> None:
    game, twin = trieste_falls._game, trieste_falls._game.fork()
    # Convoy tables are replaced, never changed; the victory list belongs to the map.
    for owner, other in [(game, twin), *zip(game.powers.values(), twin.powers.values(), strict=True)]:
        pairs = list(zip(sorted(slots(owner)), sorted(slots(other)), strict=True))
        assert len(pairs) > 5
        for (name, value), (_, copied) in pairs:
            if name not in ("convoy_paths_possible", "convoy_paths_dest"):
                assert not mutable_parts(value, set()) & mutable_parts(copied, set()), f"{name} is shared"
    assert all(power.game is twin for power in twin.powers.values())


def test_convoy_tables_are_shared_and_stay_right(self_play) -> None:
    for board, _, _ in self_play(2, phases=20):
        game, same = (Board.restore(freeze_board(board))._game for _ in range(2))
        assert same.convoy_paths_dest is game.convoy_paths_dest, "equal fleets at sea should share one table"
        fresh = diplomacy.Game()
        fresh.clear_units()
        for power in game.powers.values():
            fresh.set_units(power.name, list(power.units))
        fresh.build_caches()
        assert fresh.convoy_paths_dest == game.convoy_paths_dest
        assert fresh.convoy_paths_possible == game.convoy_paths_possible
