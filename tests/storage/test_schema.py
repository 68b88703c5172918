"""The schema is the dataclass, rows come back as they went in, and a checksum sees every change."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entente.records.rows import Decision, Ply, decision_id
from entente.telemetry.errors import DataError
from storage.arrow_files import DECISION_SCHEMA, PLY_SCHEMA, check_tokens, row_checksums, to_table

INT16, INT32, INT64, FLOAT32, TEXT = pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.string()


@pytest.mark.parametrize(("row_type", "schema"), [(Decision, DECISION_SCHEMA), (Ply, PLY_SCHEMA)])
def test_columns_are_the_fields_in_their_order_without_nulls(row_type: type, schema: pa.Schema) -> None:
    assert schema.names == [field.name for field in fields(row_type)]
    assert not any(field.nullable for field in schema)


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
        (producer, group, fork, ply) for producer in ("p", "p1") for group in (1, 11) for fork in (1, 11) for ply in (1, 11)
    ]
    found = {decision_id(*place, power) for place in places for power in ("ITALY", "FRANCE")}
    assert len(found) == 2 * len(places)
    assert all(0 < number < 2**63 for number in found)


def _decision(**given: Any) -> Decision:
    """A row of nothing but zeros and empty texts and lists."""
    nothing: dict[str, Any] = {"legal_offsets": [0]}
    for field in DECISION_SCHEMA:
        kind = field.type
        zero: Any = [] if pa.types.is_list(kind) else 0 if pa.types.is_integer(kind) else 0.0
        nothing.setdefault(field.name, "" if kind == TEXT or pa.types.is_dictionary(kind) else zero)
    return Decision(**(nothing | given))
