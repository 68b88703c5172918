"""Labels are read only if all of them were made alike, whole, and once."""

from pathlib import Path
from typing import Any

import pytest

from entente.records.label import Label
from entente.telemetry.errors import DataError, InputError
from storage import arrow_files
from storage.labels import check_made_alike, label_path, publish_alike, publish_labels, read_labels

SEARCH = {"playouts": 80, "value": "centres"}
MADE_BY: dict[str, Any] = {"years": 10, "search": SEARCH, "policy": {"weights": "aa"}, "code": {"entente.game": "1"}}
OTHER_SEARCH = MADE_BY | {"search": {"playouts": 300, "value": "centres"}}
OTHER_POLICY = MADE_BY | {"policy": {"weights": "bb"}}
OTHER_CODE = MADE_BY | {"code": {"entente.game": "2"}}


def labels(first_game: int) -> list[Label]:
    about: dict[str, Any] = {"phase": "S1901M", "power": "FRANCE", "snapshot_id": "0", "position": "{}"}
    orders = {"orders": ["A PAR H", "A PAR - BUR"], "values": [3.0, 3.5], "visits": [8, 8], "best": 1}
    return [Label(game=first_game + number, phase_index=0, **about, **orders) for number in range(4)]


def folder_of(tmp_path: Path, name: str = "round-1", made_by: dict[str, Any] = MADE_BY, first_game: int = 0) -> Path:
    folder = tmp_path / name
    assert publish_labels(folder, first_game, labels(first_game), made_by)
    return folder


def test_labels_of_folders_made_by_one_search_are_read_together(tmp_path):
    first = folder_of(tmp_path)
    folder_of(tmp_path, first_game=4)
    second = folder_of(tmp_path, "round-2", OTHER_POLICY)
    tables = read_labels([first, second])
    assert [table["game"].to_pylist() for table in tables] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    assert len(read_labels([second, folder_of(tmp_path, "of another machine", OTHER_POLICY, first_game=4)])) == 2
    assert not publish_labels(first, 4, labels(4), MADE_BY), "a file is published once"
    check_made_alike(first, MADE_BY)
    check_made_alike(tmp_path / "none", MADE_BY)


@pytest.mark.parametrize(
    ("made_by", "why"),
    [
        (OTHER_SEARCH, "search.playouts 80, not 300: keep that"),
        (OTHER_POLICY, "policy.weights 'aa', not 'bb': keep that"),
        (OTHER_CODE, "code.entente.game '1', not '2': go on with the release that made them"),
    ],
)
def test_a_folder_goes_on_only_as_it_began(tmp_path, made_by, why):
    with pytest.raises(InputError, match=f"were made with {why}, or name another folder"):
        check_made_alike(folder_of(tmp_path), made_by)


def test_of_two_commands_that_begin_a_folder_at_once_one_is_refused(tmp_path):
    folder = tmp_path / "round-1"
    for made_by in (MADE_BY, OTHER_POLICY):
        check_made_alike(folder, made_by)
    publish_alike(folder, 0, labels(0), MADE_BY)
    with pytest.raises(InputError, match=r"policy\.weights 'aa', not 'bb': keep that, or name another folder"):
        publish_alike(folder, 4, labels(4), OTHER_POLICY)
    publish_alike(folder, 8, labels(8), MADE_BY)
    assert sorted(path.name for path in folder.iterdir()) == ["000000.arrow", "000008.arrow"]


def test_labels_of_two_kinds_in_one_folder_are_refused(tmp_path):
    folder = folder_of(tmp_path)
    folder_of(tmp_path, made_by=OTHER_CODE, first_game=4)
    with pytest.raises(
        InputError, match=r"000004.arrow' was made with code.entente.game '2', not '1' as in '000000.arrow': .*named 'round-1'"
    ):
        read_labels([folder])
    other = tmp_path / "elsewhere" / "round-1"
    other.mkdir(parents=True)
    assert len(read_labels([folder, label_path(folder, 4).rename(label_path(other, 4)).parent])) == 2


def test_folders_of_two_searches_and_one_folder_twice_are_refused(tmp_path):
    first = folder_of(tmp_path)
    with pytest.raises(InputError, match=r"search.playouts 300, not 80 as in .*round-1'"):
        read_labels([first, folder_of(tmp_path, "other", OTHER_SEARCH)])
    with pytest.raises(InputError, match="hold labels of the same games"):
        read_labels([first, first])
    for drawn in ({"years": 20}, {"search_share": 0.6}, {"opponents": "dumbbot*4,v0"}, OTHER_CODE):
        with pytest.raises(InputError, match="hold labels of the same games"):
            read_labels([first, folder_of(tmp_path, f"other {[*drawn]}", MADE_BY | drawn)])
    with pytest.raises(InputError, match=r"there are no labels in .*none'"):
        read_labels([tmp_path / "none"])


def test_a_damaged_file_a_copy_and_another_schema_are_refused(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    file = label_path(folder, 0)
    whole = file.read_bytes()
    label_path(folder, 4).write_bytes(whole)
    with pytest.raises(DataError, match=r"000004.arrow was written as round-1/000000.arrow"):
        read_labels([folder])
    label_path(folder, 4).unlink()
    place = whole.index(b"A PAR - BUR")
    file.write_bytes(whole[:place] + b"A PAR - PIC" + whole[place + 11 :])
    with pytest.raises(DataError, match=r"000000.arrow has damaged rows"):
        read_labels([folder])
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"000000.arrow is not a complete Arrow file"):
        read_labels([folder])
    file.write_bytes(whole)
    monkeypatch.setattr(arrow_files, "LABEL_SCHEMA_VERSION", arrow_files.LABEL_SCHEMA_VERSION + 1)
    with pytest.raises(DataError, match=r"000000.arrow has schema version 1, this program reads 2"):
        read_labels([folder])
