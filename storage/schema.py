"""What one decision and one ply are on disk: the dataclasses, the Arrow schemas made from them, and the row
checksum.

Promise: the Arrow schema is derived from the dataclass, so the two cannot drift. ``SCHEMA_VERSION`` goes up
with every change of a field, and a reader refuses any other version. No column holds nulls.
Never: touch files (``storage/arrow_files.py`` does), or know what a token or an order means.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import pairwise
from typing import Annotated, Any, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.errors import DataError

SCHEMA_VERSION = 3
COMPONENTS = (  # reward components that a blend may weigh
    "centres_gained",
    "sos_share",
    "draw_share",
    "survival",
    "leader_gap",
    "balance",
    "units_dislodged",
    "units_driven_out",
    "orders_void",
    "orders_bounced",
)
FINAL = "final_"
"""Prefix of a weight for a component's whole sum to the fork's end, which no discount shrinks."""
WEIGHTS = (*COMPONENTS, *(FINAL + name for name in COMPONENTS))
"""Everything that a blend may weigh."""

Int16 = Annotated[int, pa.int16()]
Int32 = Annotated[int, pa.int32()]
Int64 = Annotated[int, pa.int64()]
UInt32 = Annotated[int, pa.uint32()]
Float32 = Annotated[float, pa.float32()]
Text = Annotated[str, pa.string()]
Category = Annotated[str, pa.dictionary(pa.int8(), pa.string())]
Int32List = Annotated[Sequence[int] | npt.NDArray[np.int32], pa.list_(pa.int32())]
Float32List = Annotated[Sequence[float] | npt.NDArray[np.float32], pa.list_(pa.float32())]
TextList = Annotated[Sequence[str], pa.list_(pa.string())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One power's whole order set at one ply of one fork: one prompt, one completion, one row.

    The decisions of a fork that failed later are whole, but their status says so and they are not trained on.
    """

    decision_id: Int64
    """Stable identity, positive: see decision_id()."""
    snapshot_id: Text
    """The snapshot that the fork started from."""
    start_group: Int64
    """Number of the start group, unique and growing within its producer."""
    fork: Int16
    """Number of the fork within its start group, from 0."""
    ply: Int16
    """Phase index since the fork, from 0."""
    power: Category
    """The power that decides."""
    phase: Text
    """Short phase name, e.g. S1903M."""
    game_id: Text
    """Source game of the snapshot."""
    seed: Int64
    """Seed of this decision's draws."""
    opponents: Text
    """Who plays the other powers, e.g. random, mover or policy."""
    policy_version: Int32
    """Trainer steps in the adapter that drew every token of the completion; 0 is the base model."""
    worker: Text
    """Inference worker that answered."""
    adapter_hash: Text
    """Hash of that adapter's files; of the base model for version 0."""
    input_ids: Int32List
    """[prompt_len + n_completion] token ids, prompt then completion."""
    prompt_len: Int32
    """Tokens of the prompt."""
    behaviour_logprobs: Float32List
    """[n_completion] nats, after legal mask and temperature."""
    legal_ids: Int32List
    """[legal_offsets[-1]] token ids allowed, position after position."""
    legal_offsets: Int32List
    """[n_completion + 1] position i allowed legal_ids[legal_offsets[i]:legal_offsets[i + 1]]."""
    temperature: Float32
    """Sampling temperature."""
    orders: TextList
    """The orders as given to the engine, in the order of the sites."""
    centres_gained: Float32
    """Centres, from this decision to the power's next in this fork or the fork's end."""
    sos_share: Float32
    """Change of the sum-of-squares share over the same span."""
    draw_share: Float32
    """Change of the share of a draw among the survivors over the same span."""
    survival: Float32
    """Change of being alive (0 or 1) over the same span."""
    leader_gap: Float32
    """Change of the distance to the leader (0 within three centres, then -1/18 a centre) over the same span."""
    balance: Float32
    """Change of how evenly the survivors' centres lie (0 to 1; 0 for a leader) over the same span."""
    units_dislodged: Float32
    """Units of others that its moves drove out in that span."""
    units_driven_out: Float32
    """Own units that others drove out in that span, whether they could retreat or not."""
    orders_void: Float32
    """Own orders in that span that came to nothing, as a support of a move that was not made."""
    orders_bounced: Float32
    """Own moves and retreats in that span that another unit kept out."""
    orders_rejected: Int16
    """Orders that the engine did not accept; must be 0 to be trained on."""
    status: Text
    """complete | failed."""
    reason: Text
    """Why it failed, empty when complete."""
    ended: Text
    """Why the fork ended: horizon | won | drawn | eliminated | settled | failed."""
    queue_ms: Float32
    """Milliseconds between the request and its first scheduling."""
    prefill_ms: Float32
    """Milliseconds from the first scheduling to the first token."""
    decode_ms: Float32
    """Milliseconds from the first token to the last."""
    engine_ms: Float32
    """Milliseconds that the game engine took for this ply."""
    cached_tokens: Int32
    """Prompt tokens that came from the prefix cache."""
    checksum: UInt32 = 0
    """CRC32 over all other columns of the row; to_table fills it in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ply:
    """One phase of one fork as it was played: what replay, boards and on-policy snapshots read.

    The last of a fork that ran to its end is the position it ended at, without orders; a game that is over has none.
    """

    start_group: Int64
    """As in Decision."""
    fork: Int16
    """As in Decision."""
    ply: Int16
    """As in Decision."""
    phase: Text
    """Short phase name of the position."""
    snapshot_id: Text
    """Id of the position before the orders."""
    position: Text
    """That position, canonical JSON."""
    orders: Text
    """JSON object: power -> list of orders, scripted players too."""
    results: Text
    """JSON object: unit -> list of results."""


def _schema_of(row_type: type) -> pa.Schema:
    hints = get_type_hints(row_type, include_extras=True)
    return pa.schema([pa.field(f.name, hints[f.name].__metadata__[0], nullable=False) for f in fields(row_type)])


DECISION_SCHEMA = _schema_of(Decision)
PLY_SCHEMA = _schema_of(Ply)
_SCHEMAS = {Decision: DECISION_SCHEMA, Ply: PLY_SCHEMA}


def decision_id(producer: str, start_group: int, fork: int, ply: int, power: str) -> int:
    """The same decision gets the same positive 63-bit number in every attempt and on every machine."""
    identity = "\0".join((producer, str(start_group), str(fork), str(ply), power)).encode()
    return int.from_bytes(blake2b(identity, digest_size=8).digest(), "big") >> 1 or 1


def to_table(
    rows: Sequence[Decision] | Sequence[Ply],
    row_type: type = Decision,
    provenance: Mapping[str, str] | None = None,
) -> pa.Table:
    """Rows as one Arrow table in one chunk; metadata carries the schema version and ``provenance``."""
    schema = _SCHEMAS[row_type]
    columns = {field.name: pa.array([getattr(row, field.name) for row in rows], field.type) for field in schema}
    table = pa.table(columns, schema=schema)
    if "checksum" in columns:
        place = schema.get_field_index("checksum")
        table = table.set_column(place, schema.field(place), pa.array(row_checksums(table), pa.uint32()))
    return table.replace_schema_metadata({**(provenance or {}), "schema_version": str(SCHEMA_VERSION)})


def check_tokens(table: pa.Table) -> None:
    """Refuse decisions whose token columns do not fit one another, as gathering relies on it."""
    prompt = _numpy(table["prompt_len"])
    n_completion = _lengths(table["input_ids"]) - prompt
    bounds = as_array(table["legal_offsets"])
    starts, values = bounds.offsets.to_numpy(), _numpy(bounds.values)
    n_bounds = np.diff(starts)
    rules = {
        "prompt_len lies between 0 and the number of input_ids": (prompt >= 0) & (n_completion >= 0),
        "there is one behaviour_logprob per completion token": _lengths(table["behaviour_logprobs"]) == n_completion,
        "legal_offsets holds n_completion + 1 numbers": n_bounds == n_completion + 1,
    }
    if all(fits.all() for fits in rules.values()):  # the last rule may only look where the others hold
        inside = np.ones(len(values), bool)
        inside[starts[:-1]] = False
        steps = np.diff(values, prepend=0)
        grows = np.logical_and.reduceat(~inside | (steps > 0), starts[:-1]) if len(starts) > 1 else np.ones(0, bool)
        whole = (values[starts[:-1]] == 0) & (values[starts[1:] - 1] == _lengths(table["legal_ids"]))
        rules["every completion position allows at least one legal id, and all legal ids belong to one"] = grows & whole
    for rule, fits in rules.items():
        if not fits.all():
            row = int(np.argmin(fits))
            name = f"Decision {table['decision_id'][row]} (row {row})"
            raise DataError(f"{name} breaks the rule that {rule}; mend what made it.")


def row_checksums(table: pa.Table) -> npt.NDArray[np.uint32]:
    """CRC32 over all columns of each row but ``checksum``.

    First come the row's fixed-width values together with the byte lengths of its strings and lists, then the
    content of those: as lengths are covered, a moved boundary between two rows or strings changes the sum.
    """
    n_rows = table.num_rows
    heads: list[npt.NDArray[np.uint8]] = []
    bodies: list[list[bytes | memoryview]] = []
    for column in (table.drop_columns("checksum") if "checksum" in table.column_names else table).columns:
        for offsets, width, content in _parts(as_array(column)):
            if offsets is None:
                heads.append(np.frombuffer(content, np.uint8).reshape(n_rows, width))
                continue
            ends = np.multiply(offsets, width, dtype=np.int64)
            heads.append((ends[1:] - ends[:-1]).view(np.uint8).reshape(n_rows, 8))
            bodies.append([content[start:end] for start, end in pairwise(ends.tolist())])
    head = np.concatenate(heads, axis=1) if heads else np.zeros((n_rows, 0), np.uint8)
    rows = zip(head, *bodies, strict=True)
    return np.array([zlib.crc32(b"".join(row)) for row in rows], np.uint32)


_Part = tuple[npt.NDArray[np.int32] | None, int, bytes | memoryview]
"""Where each row begins, if their widths differ; bytes of a value; all of them."""


def _parts(array: pa.Array) -> list[_Part]:
    """The bytes behind a column; a list of strings has two parts, its strings' lengths and their text."""
    if isinstance(array, pa.StringArray):
        return [(*_text(array),)]
    if isinstance(array, pa.ListArray):
        offsets, values = array.offsets.to_numpy(), array.values
        if isinstance(values, pa.StringArray):
            ends, width, text = _text(values)
            lengths = ends[1:] - ends[:-1]
            return [(offsets, lengths.itemsize, lengths.tobytes()), (ends[offsets], width, text)]
        return [(offsets, *_content(values))]
    if isinstance(array, pa.DictionaryArray):
        return _parts(array.dictionary_decode())
    return [(None, *_content(array))]


def _text(array: pa.StringArray) -> tuple[npt.NDArray[np.int32], int, bytes]:
    _, offsets, text = array.buffers()
    if offsets is None or text is None or len(array) == 0:
        return np.zeros(len(array) + 1, np.int32), 1, b""
    return np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4), 1, bytes(text)  # whose cuts cost less than views


def _content(array: pa.Array) -> tuple[int, memoryview]:
    """Bytes of a value, and all values of an array of numbers, as bytes."""
    width, (_, values) = array.type.byte_width, array.buffers()
    if values is None:
        return width, memoryview(b"")
    return width, memoryview(values)[array.offset * width : (array.offset + len(array)) * width]


def _numpy(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    return as_array(column).to_numpy(zero_copy_only=True)


def _lengths(column: pa.ChunkedArray) -> npt.NDArray[np.int32]:
    lengths: npt.NDArray[np.int32] = np.diff(as_array(column).offsets.to_numpy())
    return lengths


def as_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The column as one array, without a copy where it has one chunk, as every published file has."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column
