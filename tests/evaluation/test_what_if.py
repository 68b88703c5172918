"""What-if: equal orders differ by exactly 0, a better order has a positive difference, and both forks of a pair have one luck."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from entente.evaluation.what_if import Continuation, RecordedPosition, WhatIf, asked_power, other_orders, play_pairs
from entente.game.board import POWERS, Board
from entente.game.scores import horizon_reached
from entente.game.scripted import player
from entente.players.policy import DecisionRequest
from entente.players.seeds import seeded_rng
from entente.reports.sentences import describe_change
from entente.telemetry.errors import DataError, InputError

HOLD = Continuation(forks=6, years=1, players=("hold",))
DUMBBOT = Continuation(forks=6, years=2)


def holds(board: Board) -> dict[str, tuple[str, ...]]:
    return {power: tuple(player("hold")(legal, seeded_rng(), board)) for power, legal in board.legal_orders().items()}


@pytest.fixture
def autumn() -> RecordedPosition:
    """Autumn 1901, in which all units hold. France and Italy could dislodge the army in Munich."""
    board = Board.start()
    board.step(holds(board) | {"FRANCE": ("F BRE H", "A MAR H", "A PAR - BUR"), "ITALY": ("F NAP H", "A ROM H", "A VEN - TYR")})
    return RecordedPosition(game="game test", board=board, orders=holds(board))


def asked(
    position: RecordedPosition, orders: Sequence[str], how: Continuation = DUMBBOT, power: str = "FRANCE", **deciders: object
) -> WhatIf:
    changed = other_orders(position, orders)
    return asyncio.run(play_pairs(position, [changed] * how.forks, power, how, deciders))  # type: ignore[arg-type]


def test_orders_that_were_played_differ_by_exactly_0_in_every_pair_and_pairs_have_different_luck(autumn):
    found = asked(autumn, ["A BUR H", "A MAR H"])
    assert [pair.difference(power) for pair in found.pairs for power in POWERS] == [0] * 6 * len(POWERS)
    assert found.difference.interval == (0, 0)
    assert len({pair.played.centres for pair in found.pairs}) > 1


def test_recorded_orders_that_are_not_legal_tell_of_a_damaged_file(autumn):
    with pytest.raises(DataError, match="the recorded orders of F1901M are not legal there"):
        asked(replace(autumn, orders={**autumn.orders, "ITALY": ("A ROM - MOS",)}), ["A BUR - BEL"], HOLD)


def test_a_centre_more_is_plus_one_and_a_centre_fewer_minus_one(autumn):
    better = asked(autumn, ["A MAR - SPA"], HOLD)
    assert better.difference.mean == 1 and better.difference.excludes_zero and better.spread == {1: 6}
    after = RecordedPosition(game="game test", board=autumn.board, orders=autumn.orders | other_orders(autumn, ["A MAR-spa"]))
    assert asked(after, ["A MAR H"], HOLD).difference.mean == -1


def test_a_fork_ends_as_a_naive_loop_with_its_dice(autumn):
    found = asked(autumn, ["A BUR - BEL"])
    identity = autumn.board.snapshot_id
    for pair in found.pairs[:3]:
        for end, orders in ((pair.played, autumn.orders), (pair.changed, autumn.orders | other_orders(autumn, ["A BUR - BEL"]))):
            board, name = autumn.board.fork(), f"what-if/0/{identity}/{pair.number}"
            board.step(orders)
            while not horizon_reached("F1901M", board.phase, 2):
                legal = board.legal_orders()
                board.step(
                    {each: player("dumbbot")(own, seeded_rng(name, board.phase, each), board) for each, own in legal.items()}
                )
            assert end.centres == board.centre_counts()


def test_a_version_meets_one_luck_in_a_phase_whatever_came_before_it(autumn):
    """A retreat in one fork of a pair adds a phase there; the draws of later phases must not shift."""
    met: dict[tuple[str, str, str], set[tuple[str, int]]] = defaultdict(set)
    games: list[str] = []

    class Listens:
        async def decide(self, request: DecisionRequest) -> list[str]:
            side = request.game.split("/")[4]
            met[side, request.board.phase, request.power].add((request.rng_name, request.phase_index))
            games.append(f"{request.game}/{request.phase_index}/{request.power}")
            return player("hold")(request.legal, seeded_rng(), request.board)

    retreat = ["A TYR - MUN", "A BUR S A TYR - MUN"]
    asked(autumn, retreat, Continuation(forks=6, years=2, players=("v1",)), v1=Listens())
    assert {side for side, phase, _ in met if phase == "F1901R"} == {"changed"}
    both = [(phase, power) for side, phase, power in met if side == "played" and ("changed", phase, power) in met]
    assert ("S1902M", "FRANCE") in both
    for phase, power in both:
        assert met["played", phase, power] == met["changed", phase, power] and len(met["played", phase, power]) == 6
    assert len(games) == len(set(games)), "an engine refuses two requests of one name"


@pytest.mark.parametrize(
    ("orders", "sentence"),
    [
        (["A MAR - MOS"], "'A MAR - MOS' is no legal order of FRANCE in F1901M: A MAR can do A MAR - BUR, A MAR - GAS"),
        (
            ["A WAW H"],
            "'A WAW H' is no legal order in F1901M: what can be ordered there is AUSTRIA A BUD, F TRI, A VIE; ENGLAND F EDI",
        ),
        (["A MAR H", "A MAR - SPA"], "'A MAR - SPA' is a second order for A MAR of FRANCE in F1901M"),
        (["WAIVE"], "'WAIVE' is no legal order"),
    ],
)
def test_an_order_that_cannot_be_given_is_named(autumn, orders: list[str], sentence: str):
    with pytest.raises(InputError) as refused:
        other_orders(autumn, orders)
    assert sentence in str(refused.value)


def test_builds_are_given_as_a_whole_and_a_power_without_orders_is_refused(autumn):
    board = autumn.board.fork()
    board.step({**holds(board), **other_orders(autumn, ["A BUR - BEL", "A MAR - SPA"])})
    winter = RecordedPosition(game="game test", board=board, orders={"FRANCE": ("WAIVE", "WAIVE")})
    changed = other_orders(winter, ["a par b"])
    assert changed == {"FRANCE": ("A PAR B", "WAIVE")} and asked_power(winter, "", changed) == "FRANCE"
    waived = other_orders(winter, ["WAIVE"], "FRANCE")
    assert waived == {"FRANCE": ("WAIVE", "WAIVE")}
    built = WhatIf(position=replace(winter, orders=changed), power="FRANCE", how=HOLD, pairs=())
    assert describe_change(built, waived, "") == "France in W1901A: WAIVE instead of A PAR B"
    assert describe_change(built, changed, "") == "France in W1901A as it was played"
    with pytest.raises(InputError, match="ENGLAND has nothing to order in W1901A: it is the turn of FRANCE"):
        asked_power(winter, "ENGLAND", None)
    with pytest.raises(InputError, match="there is no power 'WALES'"):
        asked_power(winter, "WALES", changed)
    with pytest.raises(InputError, match="whose centres count: ITALY, FRANCE"):
        asked_power(autumn, "", other_orders(autumn, ["A TYR - MUN", "A BUR H"]))
