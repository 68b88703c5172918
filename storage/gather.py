"""From chosen rows to arrays: tokens are copied once, out of the mapped shards, in the recorded order.

Promise: every row's checksum is computed again from the mapped bytes and compared with the stored one and
with the one that the choice recorded; a row that differs is refused by shard and number, never handed on.
Never: choose rows, compute advantages, pad, or touch a tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.schema import as_array, row_checksums
from telemetry.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Decisions as flat arrays, in order: R rows, T tokens, C completion positions, L legal ids."""

    decision_ids: npt.NDArray[np.int64]
    """[R] identity of each row."""
    input_ids: npt.NDArray[np.int32]
    """[T] prompt then completion, row after row."""
    input_offsets: npt.NDArray[np.int64]
    """[R + 1] row r's tokens are input_ids[input_offsets[r]:input_offsets[r + 1]]."""
    prompt_lens: npt.NDArray[np.int32]
    """[R] tokens of each prompt; the rest of a row is its completion."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[C] nats under the policy that drew the token, completion positions of all rows one after another."""
    completion_offsets: npt.NDArray[np.int64]
    """[R + 1] row r's completion positions are completion_offsets[r] up to completion_offsets[r + 1]."""
    legal_ids: npt.NDArray[np.int32]
    """[L] token ids allowed, position after position."""
    legal_offsets: npt.NDArray[np.int64]
    """[C + 1] position c allowed legal_ids[legal_offsets[c]:legal_offsets[c + 1]]; one id: forced."""
    temperatures: npt.NDArray[np.float32]
    """[R] sampling temperature."""
    returns: npt.NDArray[np.float64]
    """[R] return of the decision, as selected."""
    advantage_groups: npt.NDArray[np.int32]
    """[R] number of the advantage group, from 0 upwards; -1 where rows were not chosen by groups."""
    policy_versions: npt.NDArray[np.int32]
    """[R] policy version that drew each completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The columns of one mapped shard that a batch needs, as numpy views of the mapping."""

    flat: dict[str, npt.NDArray[Any]]
    """By column: one value per row."""
    lists: dict[str, tuple[list[int], npt.NDArray[Any]]]
    """By column: offsets per row, and the values of all rows."""


_FLAT_TYPES = {
    "decision_id": np.int64,
    "prompt_len": np.int32,
    "temperature": np.float32,
    "policy_version": np.int32,
}
_LISTS = ("input_ids", "behaviour_logprobs", "legal_ids", "legal_offsets")


class ShardDamaged(DataError):
    """Chosen rows cannot be had from their shard; ``shard`` names its file below ``shards/``."""

    def __init__(self, sentence: str, shard: str) -> None:
        super().__init__(sentence)
        self.shard = shard


def gather(rows: pa.Table, open_shard: Callable[[str], pa.Table]) -> Batch:
    """One batch of ``rows`` (of a selection or a ledger); ``open_shard`` maps a shard by its name.

    Raises:
        ShardDamaged: a row's bytes are not those that were published, or not those that were chosen.
    """
    shards = rows["shard"].to_pylist()
    numbers = rows["row"].to_pylist()
    sources = {name: _source(name, rows, open_shard(name)) for name in dict.fromkeys(shards)}
    places = list(zip((sources[name] for name in shards), numbers, strict=True))
    flat = {name: np.array([source.flat[name][row] for source, row in places], dtype) for name, dtype in _FLAT_TYPES.items()}
    input_ids, input_offsets = _join(places, "input_ids", np.int32)
    logprobs, completion_offsets = _join(places, "behaviour_logprobs", np.float32)
    legal_ids, legal_starts = _join(places, "legal_ids", np.int32)
    return Batch(
        decision_ids=flat["decision_id"],
        input_ids=input_ids,
        input_offsets=input_offsets,
        prompt_lens=flat["prompt_len"],
        behaviour_logprobs=logprobs,
        completion_offsets=completion_offsets,
        legal_ids=legal_ids,
        legal_offsets=_rebase(places, completion_offsets, legal_starts),
        temperatures=flat["temperature"],
        returns=as_array(rows["return"]).to_numpy().astype(np.float64),
        advantage_groups=as_array(rows["advantage_group"]).to_numpy().astype(np.int32),
        policy_versions=flat["policy_version"],
    )


def _source(name: str, rows: pa.Table, table: pa.Table) -> _Source:
    """Verify the chosen rows of one shard, then give views of its columns."""
    mine = np.flatnonzero(np.array(rows["shard"].to_pylist(), object) == name)
    numbers = as_array(rows["row"]).to_numpy()[mine]
    beyond = numbers[(numbers < 0) | (numbers >= table.num_rows)]
    if len(beyond):
        raise ShardDamaged(f"Shard {name} has no row {beyond[0]}; the shard is not the one that was chosen from.", name)
    computed = row_checksums(table, numbers.tolist())
    damaged = numbers[computed != as_array(table["checksum"]).to_numpy()[numbers]]
    if len(damaged):
        raise ShardDamaged(f"Shard {name}, row {damaged[0]}: the checksum is wrong; remove the shard or restore it.", name)
    foreign = numbers[computed != as_array(rows["checksum"]).to_numpy()[mine]]
    if len(foreign):
        raise ShardDamaged(
            f"Shard {name}, row {foreign[0]} was replaced after it was chosen; restore the run's shards.",
            name,
        )
    lists = {column: as_array(table[column]) for column in _LISTS}
    return _Source(
        flat={column: as_array(table[column]).to_numpy() for column in _FLAT_TYPES},
        lists={column: (array.offsets.to_numpy().tolist(), array.values.to_numpy()) for column, array in lists.items()},
    )


def _join(places: list[tuple[_Source, int]], column: str, dtype: type) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The lists of all places one after another, and where each begins."""
    slices = []
    for source, row in places:
        offsets, values = source.lists[column]
        slices.append(values[offsets[row] : offsets[row + 1]])
    starts = np.zeros(len(slices) + 1, np.int64)
    np.cumsum([len(piece) for piece in slices], out=starts[1:])
    return np.concatenate([np.empty(0, dtype), *slices]), starts


def _rebase(
    places: list[tuple[_Source, int]],
    completion_offsets: npt.NDArray[np.int64],
    legal_starts: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """One CSR over all completion positions: each row's offsets, moved to its legal ids in the batch."""
    offsets = np.zeros(completion_offsets[-1] + 1, np.int64)
    for (source, row), first, last, base in zip(
        places, completion_offsets[:-1], completion_offsets[1:], legal_starts[:-1], strict=True
    ):
        bounds, values = source.lists["legal_offsets"]
        offsets[first : last + 1] = values[bounds[row] : bounds[row + 1]] + base
    return offsets
