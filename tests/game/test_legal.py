"""Legal order sets: count and membership equal brute force; sets are sorted and belong to the right power."""

import os
import subprocess
import sys
from itertools import combinations, product

import pytest

from entente.game.board import POWERS, Board
from entente.game.legal import WAIVE, LegalOrders, OrderKind, canonical_options


def legal(kind: OrderKind, picks: int, *sizes: int) -> LegalOrders:
    options = tuple(tuple(f"site {site} order {number}" for number in range(size)) for site, size in enumerate(sizes))
    return LegalOrders(
        power="FRANCE",
        kind=kind,
        sites=tuple(f"site {i}" for i in range(len(sizes))),
        options=options,
        picks=picks,
    )


def all_sets(orders: LegalOrders) -> set[tuple[str, ...]]:
    if orders.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT):
        return set(product(*orders.options))
    sizes = range(orders.picks + 1) if orders.kind is OrderKind.BUILD else [orders.picks]
    return {
        (*chosen, *[WAIVE] * (orders.picks - size))
        for size in sizes
        for sites in combinations(orders.options, size)
        for chosen in product(*sites)
    }


CASES = [
    legal(OrderKind.MOVEMENT, 2, 3, 2),
    legal(OrderKind.MOVEMENT, 3, 1, 2, 1),
    legal(OrderKind.RETREAT, 2, 1, 2),
    legal(OrderKind.BUILD, 1, 1, 2, 1),
    legal(OrderKind.BUILD, 2, 1, 2, 1),
    legal(OrderKind.BUILD, 3, 1, 2, 1),
    legal(OrderKind.DISBAND, 1, 1, 1, 1),
    legal(OrderKind.DISBAND, 2, 1, 1, 1, 1),
    *(legal(kind, 2, 1, 1) for kind in (OrderKind.MOVEMENT, OrderKind.RETREAT, OrderKind.DISBAND)),
    legal(OrderKind.BUILD, 2),
]
IDS = [f"{case.kind}-{case.picks}-of-{'-'.join(str(len(own)) for own in case.options)}" for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_count_and_membership_are_those_of_all_legal_sets(case: LegalOrders) -> None:
    """All sequences over the texts and one foreign text: repeated sites, sites out of order, early waives."""
    texts = [text for options in case.options for text in options] + [WAIVE, "A PAR H"]
    expected = all_sets(case)
    assert case.count() == len(expected) and case.is_forced == (len(expected) == 1)
    assert not case.is_forced or case.only_orders() in expected
    for length in range(case.picks + 2):
        for orders in product(texts, repeat=length):
            assert case.admits(orders) == (orders in expected), orders


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        pytest.param("A MAR S F MAO - SPA/NC, A MAR S F MAO - SPA, WAIVE", "A MAR S F MAO - SPA", id="longer spelling goes"),
        pytest.param("A MAR S F MAO - SPA/NC", "A MAR S F MAO - SPA/NC", id="only spelling stays"),
        pytest.param("F MAO - SPA/SC, F MAO - SPA/NC", "F MAO - SPA/NC, F MAO - SPA/SC", id="moves keep coasts"),
        pytest.param("A MAR S F SPA/NC, A MAR H", "A MAR H, A MAR S F SPA/NC", id="units keep coasts"),
        pytest.param("A MAR S F SPA/NC - GAS, A MAR H", "A MAR H, A MAR S F SPA/NC - GAS", id="source coast stays"),
        pytest.param("F STP/SC B, A STP B, WAIVE, F STP/NC B", "A STP B, F STP/NC B, F STP/SC B", id="builds"),
    ],
)
def test_options_of_a_site_are_canonical(listed: str, kept: str) -> None:
    assert canonical_options(listed.split(", ")) == tuple(kept.split(", "))


def test_sites_and_options_are_sorted_and_of_the_power(self_play) -> None:
    for seed in range(3):
        for board, legal_orders, _ in self_play(seed, phases=20):
            for power, own in legal_orders.items():
                assert own.power == power and len(own.sites) == len(own.options) > 0
                locations = [site.split(" ")[-1] for site in own.sites]
                assert locations == sorted(locations)
                for site, options in zip(own.sites, own.options, strict=True):
                    assert options and list(options) == sorted(set(options)) and WAIVE not in options
                    named = site if own.kind is not OrderKind.BUILD else f" {site}"
                    assert all(named in option for option in options)
                if own.kind is OrderKind.MOVEMENT:
                    assert set(own.sites) == set(board.units()[power])


def test_a_retreat_is_offered_to_the_owner_not_to_the_occupant(trieste_falls: Board) -> None:
    assert trieste_falls.phase == "F1901R"
    assert "A TRI" in trieste_falls.units()["ITALY"]
    (own,) = trieste_falls.legal_orders().values()
    assert (own.power, own.kind, own.sites, own.picks) == ("AUSTRIA", OrderKind.RETREAT, ("F TRI",), 1)
    assert own.options == (("F TRI D", "F TRI R ADR", "F TRI R ALB"),)


def test_adjustments_keep_to_the_budget(self_play) -> None:
    """Builds are at most the number allowed and free; disbands are exactly the number owed."""
    kinds = set()
    for seed in range(4):
        for board, legal_orders, orders in self_play(seed, phases=24):
            if board.phase_type != "A":
                continue
            centres, units = board.centres(), board.units()
            after = board.fork()
            after.step(orders)
            for power in POWERS:
                surplus = len(centres[power]) - len(units[power])
                own = legal_orders.get(power)
                if own is None:
                    assert surplus == 0 or (surplus > 0 and not free_homes(board, power))
                    continue
                kinds.add(own.kind)
                if surplus > 0:
                    assert own.kind is OrderKind.BUILD and own.picks == min(surplus, len(free_homes(board, power)))
                    built = [order for order in orders[power] if order != WAIVE]
                    assert len(after.units()[power]) == len(units[power]) + len(built)
                else:
                    assert own.kind is OrderKind.DISBAND and own.picks == -surplus == len(set(orders[power]))
                    assert set(units[power]) - set(after.units()[power]) == {order[:-2] for order in orders[power]}
    assert kinds == {OrderKind.BUILD, OrderKind.DISBAND}


def free_homes(board: Board, power: str) -> set[str]:
    taken = {unit[2:5] for own in board.units().values() for unit in own}
    start = {unit[2:5] for unit in Board.start().units()[power]}
    return (start & set(board.centres()[power])) - taken


_DIGEST = """
import random
from hashlib import sha256
from entente.game.board import Board
from entente.game.scripted import mover
from entente.game.prompts import board_text, power_text
digest, rng, board = sha256(), random.Random(5), Board.start()
for _ in range(25):
    legal = board.legal_orders()
    digest.update(repr(legal).encode() + board_text(board, "FRANCE").encode())
    digest.update(board.snapshot(game_id="g", seed=0, source="s").position.encode())
    result = board.step({power: mover(own, rng) for power, own in legal.items()})
    digest.update(repr(result).encode())
print(digest.hexdigest())
"""


def test_legal_lists_positions_and_results_do_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": ":".join(path for path in sys.path if path),
            },
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
