"""From chosen rows to arrays: tokens are copied once, out of the mapped shards, in the recorded order.

Promise: a shard of which a row is used is looked at again: its mapped bytes are those that were verified row by row when it was
mapped, every one of them, and the chosen rows' stored checksums are those that the choice recorded. A shard that differs is
refused by name, never handed on; nor is anything in it interpreted, for changed offsets would lead anywhere.
Never: choose rows, compute advantages, pad, or touch a tensor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.mapped import MappedShard
from storage.schema import as_array
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


_FLAT_TYPES = {
    "decision_id": np.int64,
    "prompt_len": np.int32,
    "temperature": np.float32,
    "policy_version": np.int32,
}


class ShardDamaged(DataError):
    """Chosen rows cannot be had from their shard; ``shard`` names its file below ``shards/``."""

    def __init__(self, sentence: str, shard: str) -> None:
        super().__init__(sentence)
        self.shard = shard


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The chosen rows of one shard."""

    shard: MappedShard
    rows: npt.NDArray[np.int32]
    """[n] their numbers in the shard."""
    places: npt.NDArray[np.int64]
    """[n] their places in the batch."""


def gather(rows: pa.Table, open_shard: Callable[[str], MappedShard]) -> Batch:
    """One batch of ``rows`` (of a selection or a ledger); ``open_shard`` maps a shard by its name and verifies it.

    Raises:
        ShardDamaged: a row's bytes are not those that were published, or not those that were chosen.
    """
    chosen = list(_by_shard(rows, open_shard))
    n = rows.num_rows
    input_ids, input_offsets = _join_long(chosen, "input_ids", np.int32, n)
    logprobs, completion_offsets = _join(chosen, "behaviour_logprobs", np.float32, n)
    legal_ids, legal_starts = _join(chosen, "legal_ids", np.int32, n)
    bounds, bound_starts = _join(chosen, "legal_offsets", np.int32, n)
    return Batch(
        decision_ids=_flat(chosen, "decision_id", n),
        input_ids=input_ids,
        input_offsets=input_offsets,
        prompt_lens=_flat(chosen, "prompt_len", n),
        behaviour_logprobs=logprobs,
        completion_offsets=completion_offsets,
        legal_ids=legal_ids,
        legal_offsets=_rebase(bounds, bound_starts, legal_starts),
        temperatures=_flat(chosen, "temperature", n),
        returns=as_array(rows["return"]).to_numpy().astype(np.float64),
        advantage_groups=as_array(rows["advantage_group"]).to_numpy().astype(np.int32),
        policy_versions=_flat(chosen, "policy_version", n),
    )


def _by_shard(rows: pa.Table, open_shard: Callable[[str], MappedShard]) -> Iterator[_Chosen]:
    """The chosen rows shard by shard, each verified."""
    shards = as_array(rows["shard"]).dictionary_encode()
    numbers, checksums = as_array(rows["row"]).to_numpy(), as_array(rows["checksum"]).to_numpy()
    indices = shards.indices.to_numpy()
    for index, name in enumerate(shards.dictionary.to_pylist()):
        places = np.flatnonzero(indices == index)
        chosen = _Chosen(shard=open_shard(name), rows=numbers[places], places=places)
        _verify(name, chosen, checksums[places])
        yield chosen


def _verify(name: str, chosen: _Chosen, recorded: npt.NDArray[np.uint32]) -> None:
    table, numbers = chosen.shard.table, chosen.rows
    beyond = numbers[(numbers < 0) | (numbers >= table.num_rows)]
    if len(beyond):
        raise ShardDamaged(f"Shard {name} has no row {beyond[0]}; the shard is not the one that was chosen from.", name)
    if not chosen.shard.as_verified():
        raise ShardDamaged(
            f"Shard {name} changed since it was opened: its checksum is wrong; remove the shard or restore it.", name
        )
    foreign = numbers[chosen.shard.flat("checksum")[numbers] != recorded]
    if len(foreign):
        raise ShardDamaged(
            f"Shard {name}, row {foreign[0]} was replaced after it was chosen; restore the run's shards.",
            name,
        )


def _flat(chosen: list[_Chosen], column: str, n_rows: int) -> npt.NDArray[Any]:
    values = np.empty(n_rows, _FLAT_TYPES[column])
    for some in chosen:
        values[some.places] = some.shard.flat(column)[some.rows]
    return values


def _join(chosen: list[_Chosen], column: str, dtype: type, n_rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The lists of all rows one after another, and where each begins."""
    starts = np.zeros(n_rows + 1, np.int64)
    firsts = np.zeros(n_rows, np.int64)  # where each begins in the shards' values, these laid one after another
    sources: list[npt.NDArray[Any]] = [np.empty(0, dtype)]
    before = 0
    for some in chosen:
        offsets, values = some.shard.lists(column)
        begins = offsets[some.rows]
        starts[some.places + 1] = offsets[some.rows + 1] - begins
        firsts[some.places] = begins + before
        sources.append(values)
        before += len(values)
    lengths = starts[1:].copy()
    np.cumsum(starts, out=starts)
    places = np.repeat(firsts - starts[:-1], lengths) + np.arange(starts[-1])
    return np.concatenate(sources)[places], starts


def _join_long(chosen: list[_Chosen], column: str, dtype: type, n_rows: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """As ``_join``, list by list: quicker where they have hundreds of values."""
    pieces: list[npt.NDArray[Any]] = [np.empty(0, dtype)] * n_rows
    for some in chosen:
        offsets, values = some.shard.lists(column)
        firsts, lasts = offsets[some.rows].tolist(), offsets[some.rows + 1].tolist()
        for place, first, last in zip(some.places.tolist(), firsts, lasts, strict=True):
            pieces[place] = values[first:last]
    starts = np.zeros(n_rows + 1, np.int64)
    np.cumsum([len(piece) for piece in pieces], out=starts[1:])
    return np.concatenate([np.empty(0, dtype), *pieces]), starts


def _rebase(
    bounds: npt.NDArray[np.int32], bound_starts: npt.NDArray[np.int64], legal_starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """One CSR over all completion positions: each row's offsets, moved to its legal ids in the batch, without its leading 0."""
    follow = np.ones(len(bounds), bool)
    follow[bound_starts[:-1]] = False
    moved = bounds[follow] + np.repeat(legal_starts[:-1], np.diff(bound_starts) - 1)
    return np.concatenate([np.zeros(1, np.int64), moved])
