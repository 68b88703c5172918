"""Positions are distinct, as the settings ask, separated by game and by board, and the same on every machine."""

import json
import random
import re

import pytest

from entente.game.board import Board
from entente.game.scripted import PLAYERS
from entente.game.snapshot import board_key
from entente.settings.layers import layered_settings
from entente.telemetry.errors import InputError
from state_cache.build import build, play_source_game
from state_cache.sampling import count_strata
from state_cache.settings import CacheSettings


def test_there_are_as_many_positions_as_asked_for_and_all_differ(small) -> None:
    settings, train, held_out = small
    assert (len(train), len(held_out)) == (settings.train_snapshots, settings.held_out_snapshots)
    ids = {snapshot.snapshot_id for snapshot in train + held_out}
    keys = {board_key(snapshot) for snapshot in train + held_out}
    assert len(ids) == len(keys) == len(train) + len(held_out)


def test_training_and_held_out_share_no_game_and_no_board(small) -> None:
    """Boards are compared, not ids: units, centres and phase, in any order of listing."""

    def boards(side: list) -> set[str]:
        positions = [json.loads(snapshot.position) for snapshot in side]
        return {
            json.dumps([p["phase"], [(sorted(own["units"]), sorted(own["centers"])) for own in p["powers"]]]) for p in positions
        }

    _, train, held_out = small
    assert not {snapshot.game_id for snapshot in train} & {snapshot.game_id for snapshot in held_out}
    assert not boards(train) & boards(held_out)


def test_a_cache_of_another_size_trains_from_no_game_that_this_one_holds_out(small) -> None:
    """So a policy that goes on in a run with another cache has seen none of its held-out games."""
    settings, train, held_out = small
    sizes = {"train_snapshots": settings.held_out_snapshots, "held_out_snapshots": settings.train_snapshots, "last_year": 1902}
    others = build(settings.model_copy(update=sizes))
    for kept, elsewhere in ((held_out, others[0]), (others[1], train)):
        assert not {snapshot.game_id for snapshot in kept} & {snapshot.game_id for snapshot in elsewhere}


def test_a_board_that_two_games_reach_is_kept_once() -> None:
    """Players that only hold always play the same game, with two boards: spring and autumn."""
    settings = CacheSettings(train_snapshots=2, held_out_snapshots=1, players=("hold",), first_year=1901, last_year=1901)
    with pytest.raises(InputError, match="games in a row reached no new position") as refused:
        build(settings)
    to_train, held_out = re.findall(r"(\d) of \d", str(refused.value))
    assert int(to_train) + int(held_out) == 2


def test_positions_keep_to_the_years_and_phases() -> None:
    settings = CacheSettings(train_snapshots=12, held_out_snapshots=4, first_year=1902, last_year=1903, phases=("WA",))
    for side in build(settings):
        assert {snapshot.phase_type for snapshot in side} == {"A"}
        assert {snapshot.year for snapshot in side} <= {1902, 1903}


def test_a_frozen_position_is_one_of_its_game_and_names_it() -> None:
    """A game replayed by hand from the snapshot's seed reaches the position in its phase."""
    settings = CacheSettings(players=("mover", "random", "hold"), seed=4, last_year=1903)
    for snapshot in play_source_game(17, settings):
        rng = random.Random(snapshot.seed)
        board = Board.start()
        seats = {power: PLAYERS[rng.choice(settings.players)] for power in board.units()}
        while board.phase != snapshot.phase:
            board.step({power: seats[power](own, rng, board) for power, own in board.legal_orders().items()})
        assert snapshot == board.snapshot(game_id="scripted-4-000017", seed=snapshot.seed, source="scripted:mover+random+hold")
        assert 0 <= snapshot.seed < 2**63


def test_building_again_gives_the_same_and_another_seed_others(small) -> None:
    settings, train, held_out = small
    assert build(settings) == (train, held_out)
    other, _ = build(settings.model_copy(update={"seed": 1}))
    shared = {snapshot.snapshot_id for snapshot in other} & {snapshot.snapshot_id for snapshot in train}
    assert len(shared) <= 1, "only the opening may appear under both seeds"


def test_strata_are_about_equally_frequent() -> None:
    """Compared with the same games frozen without strata: common strata are no longer more frequent than others."""
    settings = CacheSettings(train_snapshots=120, held_out_snapshots=1, last_year=1904)
    even = count_strata(build(settings)[0])
    plain = count_strata(build(settings.model_copy(update={"stratify_by": "years"}))[0])
    assert max(even.values()) - min(sorted(even.values())[-6:]) <= 3, "the six largest strata have about equal counts"
    assert max(even.values()) < max(plain.values()) and len(even) >= len(plain)
    assert {stratum.phase_type for stratum in even} == {"M", "R", "A"} and {stratum.balance for stratum in even} == {0, 1, 2}


def test_the_positions_of_the_laptop_are_the_ones_its_scores_were_taken_on() -> None:
    """First and last id of both parts, recorded when the scores in the README were measured."""
    laptop = layered_settings("laptop").cache
    settings = laptop.model_copy(update={"train_snapshots": 24, "held_out_snapshots": 12})
    train, held_out = build(settings)
    assert [snapshot.snapshot_id for snapshot in (train[0], train[-1], held_out[0], held_out[-1])] == [
        "4cc98ce2e8ae40ae",
        "e297a7687fb64554",
        "e2f98ad5a197e1e4",
        "a3b797d292df6954",
    ]
