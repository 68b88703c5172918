"""Positions that rollouts reached are those of whole forks of training games, and the rows say who reached them."""

import dataclasses
import json

import pytest

from entente.game.board import Board
from entente.game.snapshot import Snapshot, position_id
from entente.telemetry.errors import DataError
from storage.on_policy import reached_positions
from storage.shards import publish_shard


def board_after(phases: int) -> Snapshot:
    """The opening when nobody orders anything."""
    board = Board.start()
    for _ in range(phases):
        board.step({})
    return board.snapshot(game_id="", seed=0, source="")


@pytest.fixture
def put(paths, rows, rng):
    """Publish a start group whose forks reach the same two boards, the later one its own note."""

    def put(
        number: int, *, producer: str = "local", began: str = "a", forks: int = 2, powers=("FRANCE", "FRANCE"), **given
    ) -> None:
        decisions, phases = [], []
        for fork in range(forks):
            for phase_index, power in enumerate(powers):
                snapshot = board_after(phase_index)
                position = snapshot.position if phase_index == 0 else snapshot.position.replace('"note":""', f'"note":"{number}"')
                place = {"start_group": number, "fork": fork, "phase_index": phase_index, "phase": snapshot.phase}
                seed = 100 * number + 10 * fork + phase_index
                decisions.append(
                    rows.make_decision(
                        rng, producer, **place, power=power, snapshot_id=began, seed=seed, policy_version=number, **given
                    )
                )
                phases.append(rows.make_phase(**place, position=position, snapshot_id=position_id(position)))
        publish_shard(paths, producer, number, decisions, phases, {}, next_start_group=number + 1)

    return put


def reached(paths, **given) -> list[Snapshot]:
    return reached_positions(paths, **({"producer": "local", "before": 100, "held_out": ()} | given))


def test_a_position_tells_its_board_and_who_reached_it(paths, put) -> None:
    put(7)
    (found,) = reached(paths)
    wanted = board_after(1)
    assert json.loads(found.position)["note"] == "7", "the position after the policy's orders, not the one it was given"
    assert (found.game_id, found.source, found.seed) == ("a-local-000007-0", "policy:7", 700)
    assert found.power == "FRANCE"
    bare = dataclasses.replace(found, position="", snapshot_id="", game_id="", source="", seed=0, power="")
    assert bare == dataclasses.replace(wanted, position="", snapshot_id="")
    assert Board.restore(found).phase == wanted.phase


def test_where_the_policy_had_several_powers_none_is_named(paths, put) -> None:
    put(0, powers=("FRANCE", "ITALY"))
    assert [snapshot.power for snapshot in reached(paths)] == [""]


def test_newer_groups_come_first_and_later_ones_do_not_count(paths, put) -> None:
    for number in (0, 2, 5):
        put(number)
    assert [snapshot.source for snapshot in reached(paths)] == ["policy:5", "policy:2", "policy:0"]
    before = reached(paths, before=5)
    put(9)
    assert reached(paths, before=5) == before and len(before) == 2


def test_start_groups_above_a_million_count_too(paths, put) -> None:
    for number in (998_000, 999_999, 1_000_000):  # the first is too old
        put(number)
    assert [found.source for found in reached(paths, before=1_000_001)] == ["policy:1000000", "policy:999999"]


def test_nothing_comes_of_evaluation_of_other_producers_or_of_failed_forks(paths, put) -> None:
    put(0, began="kept apart")
    put(1, producer="probe")
    put(2, status="failed", reason="engine")
    put(3)
    (allowed,) = reached(paths, held_out={"kept apart"})
    assert allowed.source == "policy:3"
    assert reached(paths, held_out={"kept apart", allowed.snapshot_id}) == [], "a held-out position stays one, whoever reached it"
    assert len(reached(paths)) == 2


def test_a_damaged_shard_is_named_and_not_left_out_in_silence(paths, put) -> None:
    for number in (0, 1):
        put(number)
    file = paths.shards / "local" / "000001.arrow"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"first local/000001\.arrow: .* Move them out of the run"):
        reached(paths)


def test_a_phase_index_that_holds_another_position_is_named(paths, rows, rng) -> None:
    place = {"start_group": 0, "fork": 0, "phase_index": 1, "phase": "F1901M"}
    publish_shard(
        paths, "local", 0, [rows.make_decision(rng, "local", **place)], [rows.make_phase(**place)], {}, next_start_group=1
    )
    with pytest.raises(DataError, match="another position"):
        reached(paths)
