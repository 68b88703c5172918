"""A refreshed training part has its share of reached positions, and no position used by evaluation."""

import dataclasses
import random

import pytest

from entente.game.board import Board
from entente.game.scripted import player
from entente.game.snapshot import Snapshot, board_key, position_id
from entente.telemetry.errors import InputError
from state_cache.build import SNAPSHOTS_PER_GAME
from state_cache.refresh import refresh
from state_cache.settings import NEWEST, CacheSettings


def played_on(starts: list[Snapshot], phases: int = 4) -> list[Snapshot]:
    """Positions that a run could reach from these: `phases` of each, each start in its own group."""
    found = []
    for number, start in enumerate(starts):
        board, rng = Board.restore(start), random.Random(number)
        for _ in range(phases):
            board.step({power: player("random")(own, rng, board) for power, own in board.legal_orders().items()})
            found.append(board.snapshot(game_id=f"mine-local-{number:06d}", seed=number, source="policy:3"))
    return found


@pytest.fixture(scope="module")
def reached(small) -> list[Snapshot]:
    return played_on(small[1])


@pytest.fixture
def settings(small) -> CacheSettings:
    given = {"from_run": "mine", "from_groups": 30, "last_year": 1905}
    return CacheSettings.model_validate(small[0].model_dump() | given)


@pytest.mark.parametrize(("share", "count"), [(0.25, 8), (0.5, 15), (0.01, 1)])
def test_the_share_comes_in_and_the_rest_stays(small, reached, settings, share: float, count: int) -> None:
    _, train, held_out = small
    wanted = settings.model_copy(update={"on_policy_share": share})
    after = refresh(wanted, train, held_out, reached)
    assert len(after) == len(train) and len({board_key(snapshot) for snapshot in after}) == len(after)
    assert [snapshot for snapshot in after if snapshot in train] == after[:-count]
    assert after[-count:] == [snapshot for snapshot in after if snapshot.game_id.startswith("mine-")]
    assert refresh(wanted, train, held_out, reached) == after, "equal settings give the same cache"


def test_no_held_out_position_comes_in_by_id_by_game_or_as_a_board(small, reached, settings) -> None:
    """The run reached only held-out positions: with their ids, with other texts, and in games that began there."""
    _, train, held_out = small
    same = [dataclasses.replace(snapshot, game_id="mine-local-1", source="policy:3") for snapshot in held_out]
    respelled = [_respelled(snapshot) for snapshot in same]
    theirs = [dataclasses.replace(snapshot, game_id=held_out[0].game_id) for snapshot in reached]
    assert {snapshot.snapshot_id for snapshot in respelled}.isdisjoint(snapshot.snapshot_id for snapshot in held_out)
    for forbidden in (same, respelled, theirs):
        with pytest.raises(InputError, match="reached no new position"):
            refresh(settings, train, held_out, forbidden)
    after = refresh(settings, train, held_out, [*same, *respelled, *theirs, *reached])
    assert {board_key(snapshot) for snapshot in after}.isdisjoint(board_key(snapshot) for snapshot in held_out)
    assert {snapshot.game_id for snapshot in after}.isdisjoint(snapshot.game_id for snapshot in held_out)


def _respelled(snapshot: Snapshot) -> Snapshot:
    text = snapshot.position.replace('"phase":"', '"phase": "', 1)
    return dataclasses.replace(snapshot, position=text, snapshot_id=position_id(text))


def test_what_comes_in_keeps_to_the_years_and_phases_and_to_a_few_of_a_fork(small, reached, settings) -> None:
    _, train, held_out = small
    narrow = settings.model_copy(update={"phases": ("FM",), "last_year": 1903, "on_policy_share": 0.9})
    coming = [snapshot for snapshot in refresh(narrow, train, held_out, reached) if snapshot not in train]
    assert coming and all(snapshot.season + snapshot.phase_type == "FM" and snapshot.year <= 1903 for snapshot in coming)
    one_fork = [dataclasses.replace(snapshot, game_id="mine-local-000000-0") for snapshot in reached]
    coming = [snapshot for snapshot in refresh(settings, train, held_out, one_fork) if snapshot not in train]
    assert len(coming) == SNAPSHOTS_PER_GAME


def test_forks_that_end_before_a_winter_give_the_spring_after_it(small, settings) -> None:
    """Forks of one year end in their winter wherever a centre changed, and the presets freeze springs alone."""
    _, train, held_out = small
    springs = settings.model_copy(update={"phases": ("SM",), "last_year": 1910, "on_policy_share": 0.3})
    winters = [snapshot for snapshot in played_on(train, 12) if snapshot.phase_type == "A"]
    after = refresh(springs, train, held_out, [dataclasses.replace(winter, power="FRANCE") for winter in winters])
    new, by_fork = [snapshot for snapshot in after if snapshot not in train], {winter.game_id: winter for winter in winters}
    assert len(new) == 9
    for spring in new:
        assert (spring.season + spring.phase_type, spring.power, spring.source) == ("SM", "FRANCE", "policy:3")
        board, counts = Board.restore(spring), Board.restore(spring).centre_counts()
        assert counts == Board.restore(by_fork[spring.game_id]).centre_counts(), "a winter moves no centre"
        assert all(len(units) <= count for units, count in zip(board.units().values(), counts, strict=True))
    assert refresh(springs, train, held_out, winters) == refresh(springs, train, held_out, winters)
    with pytest.raises(InputError, match="reached no new position"):
        refresh(springs.model_copy(update={"phases": ("FM",)}), train, held_out, winters)


def test_a_share_names_its_run_and_its_groups() -> None:
    for run, groups in (("mine", 0), ("", 8), (NEWEST, 8)):
        with pytest.raises(ValueError, match=f"from_run '{run}' and from_groups {groups} go together"):
            CacheSettings(from_run=run, from_groups=groups)
    refreshed = CacheSettings(seed=4, from_run="mine", from_groups=8, on_policy_share=0.5)
    assert refreshed.scripted == CacheSettings(seed=4)
