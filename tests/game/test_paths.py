"""The fast and the plain path give equal positions, results and legal orders in every phase."""

import random
from dataclasses import replace

import pytest

from entente.game import adjudicator, rules
from entente.game.adjudicator import freeze
from entente.game.board import POWERS, Board
from entente.game.plain import PackageGame, PlainGame, plain_board
from entente.game.snapshot import Snapshot, position_id
from entente.telemetry.errors import EngineError


def convoy_heavy(rng: random.Random) -> Snapshot:
    """A movement phase with many fleets at sea and armies on the coasts."""
    game = PlainGame()
    places = sorted({place.upper()[:3] for place in game.map.locs})
    seas = [place for place in places if game.map.area_type(place) == "WATER"]
    coasts = [place for place in places if game.map.area_type(place) in ("COAST", "PORT")]
    units = [f"F {place}" for place in rng.sample(seas, rng.randint(6, 13))]
    units += [f"A {place}" for place in rng.sample(coasts, rng.randint(9, 15))]
    rng.shuffle(units)
    game.clear_units()
    for at, power in enumerate(POWERS):
        game.set_units(power, units[at :: len(POWERS)])
    game.rebuild_hash()
    text = freeze(game)
    return replace(Board.start().snapshot(game_id="g", seed=0, source="test"), position=text, snapshot_id=position_id(text))


def play_side_by_side(phases: int, players, convoys: bool) -> dict[str, int]:
    """Plays phases of every type on both paths and compares before and after each; returns counts by type."""
    seen = {"M": 0, "R": 0, "A": 0, "via": 0}
    seed = 0
    while seen["M"] + seen["R"] + seen["A"] < phases:
        rng = random.Random(f"{convoys} {seed}")
        seed += 1
        snapshot = convoy_heavy(rng) if convoys else None
        fast, plain = Board.restore(snapshot) if snapshot else Board.start(), plain_board(snapshot)
        for _ in range(6 if convoys else 24):
            if fast.is_over:
                break
            assert freeze(fast._game) == freeze(plain._game)
            legal = plain.legal_orders()
            assert fast.legal_orders() == legal
            orders = {power: players[rng.choice(sorted(players))](own, rng) for power, own in legal.items()}
            if convoys:
                orders |= {power: with_convoys(own, orders[power], rng) for power, own in legal.items()}
            dropped = rng.choice([0.0, 0.0, 0.2])
            orders = {power: [order for order in own if rng.random() >= dropped] for power, own in orders.items()}
            seen[fast.phase_type] += 1
            seen["via"] += sum(" VIA" in order or " C A " in order for own in orders.values() for order in own)
            assert fast.step(orders) == plain.step(orders)
        assert freeze(fast._game) == freeze(plain._game)
    return seen


def with_convoys(legal, orders: list[str], rng: random.Random) -> list[str]:
    """The same orders, but half of the units that can convoy or be convoyed do so."""
    if len(orders) != len(legal.options) or legal.kind != "movement":
        return orders
    found = [[order for order in options if " VIA" in order or " C A " in order] for options in legal.options]
    return [rng.choice(by_sea) if by_sea and rng.random() < 0.5 else order for by_sea, order in zip(found, orders, strict=True)]


@pytest.mark.parametrize("convoys", [False, True], ids=["from the start", "convoy-heavy"])
@pytest.mark.parametrize("phases", [160, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fast_and_plain_play_the_same_games(blind_players, convoys: bool, phases: int) -> None:
    seen = play_side_by_side(phases, blind_players, convoys)
    assert min(seen["M"], seen["R"], seen["A"]) >= 5 and (seen["via"] > 100 or not convoys)


def test_another_release_of_the_engine_is_refused_where_private_names_of_it_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "version", lambda name: "1.2.0")
    adjudicator._template.cache_clear()
    for start in (Board.start, plain_board):
        with pytest.raises(EngineError, match=r"need diplomacy 1\.1\.2, and 1\.2\.0 is installed"):
            start()
    assert plain_board(kind=PackageGame).phase == "S1901M"
