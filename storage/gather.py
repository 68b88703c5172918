"""Copies chosen rows from the mapped shards into arrays, in the recorded order.

Before a row is used, the bytes of its whole shard are compared with those that were verified when it was mapped, and its
checksum with the one that the choice recorded. A shard that differs is refused by name before anything in it is interpreted,
because changed offsets could point anywhere. Consecutive rows of a shard, such as those of an advantage group, are copied in
one piece. Each token is copied once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.mapped import MappedShard, ShardDamaged
from storage.schema import as_array


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Decisions as flat arrays, in order: R rows, T tokens, C completion positions, L legal ids.

    The caller owns the arrays: nothing else writes into them.
    """

    decision_ids: npt.NDArray[np.int64]
    """[R] decision id of each row."""
    input_ids: npt.NDArray[np.int32]
    """[T] prompt, then completion, row after row."""
    input_offsets: npt.NDArray[np.int64]
    """[R + 1] row r's tokens are input_ids[input_offsets[r]:input_offsets[r + 1]]."""
    prompt_lens: npt.NDArray[np.int32]
    """[R] prompt tokens; the rest of the row is its completion."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[C] nats under the policy that drew the token; completion positions, row after row."""
    completion_offsets: npt.NDArray[np.int64]
    """[R + 1] completion positions of row r are completion_offsets[r] to completion_offsets[r + 1]."""
    legal_ids: npt.NDArray[np.int32]
    """[L] legal token ids, position after position; two numbers for an open set (entente/decoding/open_set.py)."""
    legal_offsets: npt.NDArray[np.int64]
    """[C + 1] legal ids of position c are legal_ids[legal_offsets[c]:legal_offsets[c + 1]]; one id: forced."""
    temperatures: npt.NDArray[np.float32]
    """[R] sampling temperature."""
    returns: npt.NDArray[np.float64]
    """[R] return of each decision, as selected."""
    advantage_groups: npt.NDArray[np.int32]
    """[R] number of the advantage group, from 0; -1 if rows were not chosen by group."""
    policy_versions: npt.NDArray[np.int32]
    """[R] policy version that drew each completion."""


_Run = tuple[MappedShard, int, int]
"""Rows that are consecutive in a shard and in the batch: shard, first row, one after the last."""


def gather(rows: pa.Table, open_shard: Callable[[str], MappedShard]) -> Batch:
    """The batch of `rows`, from a selection or a ledger.

    Args:
        open_shard: maps a shard by its name and verifies it.

    Raises:
        ShardDamaged: a row differs from what was published, or from what was chosen.
    """
    runs = _runs(rows, open_shard)
    _refuse_replaced(rows, runs)
    input_offsets, legal_starts = (_offsets(_lengths(runs, name)) for name in ("input_ids", "legal_ids"))
    prompt_lens = _single(runs, "prompt_len", np.int32)
    n_completion = np.diff(input_offsets) - prompt_lens
    completion_offsets = _offsets(n_completion)
    legal_before = np.repeat(legal_starts[:-1], n_completion)
    return Batch(
        decision_ids=_single(runs, "decision_id", np.int64),
        input_ids=_pack(runs, "input_ids", np.int32),
        input_offsets=input_offsets,
        prompt_lens=prompt_lens,
        behaviour_logprobs=_pack(runs, "behaviour_logprobs", np.float32),
        completion_offsets=completion_offsets,
        legal_ids=_pack(runs, "legal_ids", np.int32),
        legal_offsets=_rebased(_pack(runs, "legal_offsets", np.int32), completion_offsets, legal_before),
        temperatures=_single(runs, "temperature", np.float32),
        returns=as_array(rows["return"]).to_numpy().astype(np.float64),
        advantage_groups=as_array(rows["advantage_group"]).to_numpy().astype(np.int32),
        policy_versions=_single(runs, "policy_version", np.int32),
    )


def _runs(rows: pa.Table, open_shard: Callable[[str], MappedShard]) -> list[_Run]:
    """The chosen rows in their order, as few runs as possible; every shard is verified."""
    names = rows["shard"].to_pylist()
    shards = {name: _verified(open_shard(name)) for name in dict.fromkeys(names)}
    found: list[tuple[str, int, int]] = []
    name, first, after = None, 0, 0
    # A plain loop: for so few rows it is faster than Arrow and numpy.
    for next_name, number in zip(names, rows["row"].to_pylist(), strict=True):
        if number != after or next_name != name:
            if name is not None:
                found.append((name, first, after))
            name, first = next_name, number
        after = number + 1
    if name is not None:
        found.append((name, first, after))
    return [_within(shards[name], first, after) for name, first, after in found]


def _verified(shard: MappedShard) -> MappedShard:
    if not shard.is_unchanged():
        raise ShardDamaged(
            f"Shard {shard.name} changed since it was opened: its checksum is wrong; remove the shard or restore it.", shard.name
        )
    return shard


def _within(shard: MappedShard, first: int, after: int) -> _Run:
    if first < 0 or after > shard.n_rows:
        beyond = first if first < 0 else max(first, shard.n_rows)
        raise ShardDamaged(f"Shard {shard.name} has no row {beyond}; the shard is not the one that was chosen from.", shard.name)
    return shard, first, after


def _refuse_replaced(rows: pa.Table, runs: list[_Run]) -> None:
    foreign = np.flatnonzero(_single(runs, "checksum", np.uint32) != as_array(rows["checksum"]).to_numpy())
    if len(foreign):
        name, row = rows["shard"][int(foreign[0])].as_py(), rows["row"][int(foreign[0])]
        raise ShardDamaged(f"Shard {name}, row {row} was replaced after it was chosen; restore the run's shards.", name)


def _single(runs: list[_Run], column: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    """[R] a scalar column."""
    return _join([shard.columns[column][first:after] for shard, first, after in runs], kind)


def _join(pieces: list[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(pieces, dtype=kind) if pieces else np.empty(0, kind)


def _lengths(runs: list[_Run], column: str) -> npt.NDArray[np.int32]:
    """[R] length of each row's list."""
    starts = [shard.lists[column][0][first:after] for shard, first, after in runs]
    ends = [shard.lists[column][0][first + 1 : after + 1] for shard, first, after in runs]
    return _join(ends, np.int32) - _join(starts, np.int32)


def _offsets(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[R + 1] start of each row in the concatenated rows."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _pack(runs: list[_Run], column: str, kind: type[np.generic]) -> npt.NDArray[Any]:
    """The lists of all rows, row after row."""
    pieces = []
    for shard, first, after in runs:
        offsets, values = shard.lists[column]
        pieces.append(values[offsets[first] : offsets[after]])
    return _join(pieces, kind)


def _rebased(
    bounds: npt.NDArray[np.int32], completion_offsets: npt.NDArray[np.int64], legal_before: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """One CSR over all positions: each row's offsets without the leading 0, plus the number of legal ids before the row."""
    follow = np.ones(len(bounds), bool)
    follow[completion_offsets[:-1] + np.arange(len(completion_offsets) - 1)] = False
    legal_offsets = np.zeros(len(legal_before) + 1, np.int64)
    np.add(bounds[follow], legal_before, out=legal_offsets[1:])
    return legal_offsets
