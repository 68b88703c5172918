"""Columns and counts of a cache are checked against the positions themselves, even if every hash matches."""

import dataclasses
from pathlib import Path

import pytest

from entente.game.snapshot import Snapshot, position_id
from entente.telemetry.errors import DataError
from state_cache.store import write_cache
from state_cache.verify import verify


def other_text(snapshot: Snapshot) -> Snapshot:
    """A position text that restores to another text: the same JSON with different spacing."""
    position = snapshot.position.replace('"phase":"', '"phase": "', 1)
    return dataclasses.replace(snapshot, position=position, snapshot_id=position_id(position))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        pytest.param(lambda s: dataclasses.replace(s, snapshot_id="0" * 16), "is damaged", id="another id"),
        pytest.param(lambda s: dataclasses.replace(s, year=1999), "restores to another", id="another year"),
        pytest.param(lambda s: dataclasses.replace(s, centres=(34, 0, 0, 0, 0, 0, 0)), "restores to another", id="centres"),
        pytest.param(other_text, "restores to another", id="another text"),
        pytest.param(
            lambda s: dataclasses.replace(s, position='{"map":1}', snapshot_id=position_id('{"map":1}')),
            "no position of this version",
            id="no position",
        ),
    ],
)
def test_a_position_that_is_not_what_its_columns_say_is_named(small, tmp_path: Path, damage, sentence: str) -> None:
    settings, train, held_out = small
    path = write_cache(tmp_path, settings, [*train[:-1], damage(train[-1])], held_out)
    with pytest.raises(DataError, match=sentence) as refused:
        verify(path)
    assert "train.arrow" in str(refused.value)


def test_a_board_or_a_game_on_both_sides_is_found(small, tmp_path: Path) -> None:
    settings, train, held_out = small
    with pytest.raises(DataError, match="has game"):
        verify(write_cache(tmp_path / "game", settings, train, [*held_out, train[0]]))
    elsewhere = dataclasses.replace(train[0], game_id="another")
    with pytest.raises(DataError, match="has board"):
        verify(write_cache(tmp_path / "board", settings, train, [*held_out, elsewhere]))
