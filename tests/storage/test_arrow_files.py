"""Rows come back from a file as they went in, a checksum sees every change, and no damaged byte is read as data."""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entente.records.rows import Decision, decision_id
from entente.telemetry.errors import DataError
from storage import arrow_files
from storage.arrow_files import DECISION_SCHEMA, SCHEMA_VERSION, check_tokens, map_arrow, read_metadata, row_checksums, to_table
from storage.shards import open_phases, open_shard

ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6)
floats = st.lists(st.floats(width=32, allow_nan=False), max_size=6)
list_columns = st.fixed_dictionaries(
    {
        "input_ids": ids,
        "behaviour_logprobs": floats,
        "legal_ids": ids,
        "legal_offsets": ids,
        "orders": st.lists(st.text(st.characters(codec="utf-8"), max_size=5), max_size=4),
    }
)


@settings(max_examples=25)
@given(st.lists(list_columns, min_size=1, max_size=5))
def test_list_columns_come_back_as_they_went_in(columns: list[dict[str, Any]]) -> None:
    table = to_table([_decision(**row) for row in columns])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    read = pa.ipc.open_file(sink.getvalue()).read_all()
    assert [{name: row[name] for name in columns[0]} for row in read.to_pylist()] == columns
    assert row_checksums(read).tolist() == read["checksum"].to_pylist()


def test_numpy_arrays_and_lists_make_the_same_row(rows: Any, rng: Any) -> None:
    row = rows.make_decision(rng)
    arrays = replace(
        row,
        input_ids=np.array(row.input_ids, np.int32),
        behaviour_logprobs=np.array(row.behaviour_logprobs, np.float32),
        legal_ids=np.array(row.legal_ids, np.int32),
        legal_offsets=np.array(row.legal_offsets, np.int32),
    )
    assert to_table([row]).equals(to_table([arrays]))


@pytest.mark.parametrize("name", [field.name for field in fields(Decision) if field.name != "checksum"])
def test_a_change_of_any_column_changes_that_row_s_checksum_only(name: str, rows: Any, rng: Any) -> None:
    decisions = [rows.make_decision(rng, fork=fork) for fork in range(3)]
    before = row_checksums(to_table(decisions))
    value = getattr(decisions[1], name)
    other = {
        str: lambda: value + "x",
        int: lambda: value + 1,
        float: lambda: value + 0.5,
        list: lambda: value[::-1] + value[:1],
    }
    decisions[1] = replace(decisions[1], **{name: other[type(value)]()})
    assert (row_checksums(to_table(decisions)) != before).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"orders": ["AB", "C"]}, {"orders": ["A", "BC"]}),
        ({"orders": ["AB"]}, {"orders": ["AB", ""]}),
        ({"input_ids": [1, 2], "legal_ids": [3]}, {"input_ids": [1], "legal_ids": [2, 3]}),
        ({"worker": "ab", "adapter_hash": "c"}, {"worker": "a", "adapter_hash": "bc"}),
        ({"status": "", "reason": "x"}, {"status": "x", "reason": ""}),
    ],
    ids=["between strings", "empty string", "between lists", "between columns", "empty column"],
)
def test_a_moved_boundary_changes_the_checksum(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert row_checksums(to_table([_decision(**one)])) != row_checksums(to_table([_decision(**other)]))


def test_checksums_depend_on_the_row_alone_not_on_its_neighbours_or_its_chunk(rows: Any, rng: Any) -> None:
    decisions = [rows.make_decision(rng, fork=fork, power=power) for fork in range(4) for power in ("ITALY", "FRANCE")]
    table = to_table(decisions)
    alone = [int(row_checksums(to_table([decision]))[0]) for decision in decisions]
    assert row_checksums(table).tolist() == alone
    assert row_checksums(table.slice(3, 4)).tolist() == alone[3:7]
    assert row_checksums(pa.concat_tables([table.slice(0, 3), table.slice(3)])).tolist() == alone


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt_len": 4},
        {"behaviour_logprobs": [-0.5]},
        {"legal_offsets": [0, 1]},
        {"legal_offsets": [0, 4, 3]},
        {"legal_offsets": [0, 1, 2]},
    ],
    ids=str,
)
def test_token_columns_that_do_not_fit_one_another_are_refused(broken: dict[str, Any]) -> None:
    good = {
        "input_ids": [1, 2, 3],
        "prompt_len": 1,
        "behaviour_logprobs": [-1, -2],
        "legal_ids": [2, 3, 4],
        "legal_offsets": [0, 1, 3],
    }
    check_tokens(to_table([_decision(**good), _decision(**good)]))
    with pytest.raises(DataError, match=r"Decision 8 \(row 1\) breaks the rule"):
        check_tokens(to_table([_decision(**good), _decision(**(good | broken), decision_id=8), _decision(**good)]))


def test_decision_ids_are_stable_positive_and_distinct() -> None:
    assert decision_id("p0", 12, 3, 1, "ITALY") == 5865979312059305787
    places = [
        (producer, group, fork, phase_index)
        for producer in ("p", "p1")
        for group in (1, 11)
        for fork in (1, 11)
        for phase_index in (1, 11)
    ]
    found = {decision_id(*place, power) for place in places for power in ("ITALY", "FRANCE")}
    assert len(found) == 2 * len(places)
    assert all(0 < number < 2**63 for number in found)


@pytest.mark.parametrize("of_phases", [False, True], ids=["decisions", "phases"])
def test_no_flipped_byte_is_read_as_data(publish: Callable[..., Any], of_phases: bool) -> None:
    """Wherever a byte of the file is flipped, reading refuses it, or nothing that is read has changed."""
    shard, _ = publish(range(1), forks=2)
    path = shard.phases_path if of_phases else shard.path
    whole = path.read_bytes()
    expected = open_phases(shard.path) if of_phases else open_shard(shard.path)
    contents, metadata = expected.to_pylist(), expected.schema.metadata
    del expected
    data = _data_bytes(path)
    assert len(data) > 400
    for place in sorted({*data[::41], *range(0, len(whole), 101)}):
        path.unlink()  # a new file each time: a mapped one is never changed in place
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            read = open_phases(shard.path) if of_phases else open_shard(path)
        except DataError as error:
            assert path.name in str(error)
        else:
            assert place not in data, f"byte {place} of a row was flipped and nobody noticed"
            assert (read.to_pylist(), read.schema.metadata) == (contents, metadata)


def _data_bytes(path: Path) -> list[int]:
    """Positions in the file of every byte that belongs to a value, length or text of a row; not padding."""
    source = pa.memory_map(str(path))
    base = source.read_buffer().address
    source.seek(0)
    found: list[int] = []
    pending = [column.chunk(0) for column in pa.ipc.open_file(source).read_all().columns]
    while pending:
        array = pending.pop()
        kind = array.type
        if pa.types.is_dictionary(kind):
            pending += [array.indices, array.dictionary]
            continue
        sizes = {1: len(array) * kind.bit_width // 8} if pa.types.is_primitive(kind) else {1: 4 * (len(array) + 1)}
        if pa.types.is_list(kind):
            pending.append(array.values)
        if pa.types.is_string(kind):
            sizes[2] = sum(len(text.encode()) for text in array.to_pylist())
        for number, size in sizes.items():
            buffer = array.buffers()[number]
            found += range(buffer.address - base, buffer.address - base + size) if size else []
    assert max(found) < path.stat().st_size
    return sorted(found)


def test_a_file_with_nulls_is_refused(tmp_path: Path) -> None:
    assert arrow_files.write_arrow(pa.table({"a": ["x", None]}), tmp_path / "a.arrow", {})
    with pytest.raises(DataError, match="holds nulls"):
        arrow_files.map_arrow(tmp_path / "a.arrow")


@pytest.mark.parametrize("read", [map_arrow, read_metadata])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    keeps_it_open = os.open(tmp_path / "pipe", os.O_RDWR)  # else a reader that opens it would wait for ever
    (tmp_path / "000000.arrow").symlink_to("pipe")
    try:
        with pytest.raises(DataError, match="is not a regular file"):
            read(tmp_path / "000000.arrow")
    finally:
        os.close(keeps_it_open)


def test_another_schema_version_is_refused_by_its_number(publish: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_files, "SCHEMA_VERSION", 99)
    shard, _ = publish(range(1), producer="future")
    monkeypatch.undo()
    with pytest.raises(DataError, match=f"has schema version 99, this program reads {SCHEMA_VERSION}"):
        open_shard(shard.path)


def _decision(**given: Any) -> Decision:
    """A row of nothing but zeros and empty texts and lists."""
    nothing: dict[str, Any] = {"legal_offsets": [0]}
    for field in DECISION_SCHEMA:
        kind = field.type
        zero: Any = [] if pa.types.is_list(kind) else 0 if pa.types.is_integer(kind) else 0.0
        nothing.setdefault(field.name, "" if kind == pa.string() or pa.types.is_dictionary(kind) else zero)
    return Decision(**(nothing | given))
