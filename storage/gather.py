"""Maps shards, and copies chosen rows into arrays, in the recorded order; each token is copied once.

Mapping verifies every row. Before use, the bytes of the whole shard are compared with the verified ones, and the row's
checksum with the selection's. A shard that differs is refused before it is interpreted, because changed offsets could point
anywhere. Consecutive rows of a shard, such as an advantage group, are copied in one piece.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from entente.telemetry.errors import DataError
from storage.arrow_files import DECISION_SCHEMA, MappedFile, as_array, map_arrow

MAPPED = 64
"""Shards that stay mapped: enough for a staleness budget, and few, because mapped pages count as RSS. Linux allows a process
65,530 mappings, and a long run has more shards."""


class ShardDamaged(DataError):
    """Chosen rows cannot be read from their shard; `shard` is its name below `shards/`."""

    def __init__(self, sentence: str, shard: str) -> None:
        super().__init__(sentence)
        self.shard = shard


class MappedShards:
    """Shards of one folder, mapped on demand, least recently used first out; a dropped one stays valid while a reader uses it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: OrderedDict[str, MappedFile] = OrderedDict()

    def __len__(self) -> int:
        return len(self._mapped)

    def get(self, name: str) -> MappedFile:
        """Raises ShardDamaged if the shard is missing or damaged."""
        if name not in self._mapped:
            try:
                self.keep(name, map_arrow(self._folder / name, DECISION_SCHEMA))
            except DataError as error:
                raise ShardDamaged(str(error), name) from error
        self._mapped.move_to_end(name)
        return self._mapped[name]

    def keep(self, name: str, file: MappedFile) -> None:
        self._mapped[name] = file
        while len(self._mapped) > MAPPED:
            self._mapped.popitem(last=False)

    def drop(self, name: str) -> None:
        self._mapped.pop(name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Decisions as flat arrays, in order: R rows, T tokens, C completion positions, L legal ids. The caller owns the arrays."""

    decision_ids: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int32]
    """[T] prompt, then completion, row after row."""
    input_offsets: npt.NDArray[np.int64]
    """[R + 1] row r's tokens are input_ids[input_offsets[r]:input_offsets[r + 1]]."""
    prompt_lens: npt.NDArray[np.int32]
    """[R] prompt tokens; the rest of the row is its completion."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """[C] nats under the policy that sampled the token; completion positions, row after row."""
    completion_offsets: npt.NDArray[np.int64]
    """[R + 1] completion positions of row r are completion_offsets[r] to completion_offsets[r + 1]."""
    legal_ids: npt.NDArray[np.int32]
    """[L] legal token ids, position after position; an open set (entente/decoding/open_set.py) has more than one number."""
    legal_offsets: npt.NDArray[np.int64]
    """[C + 1] legal ids of position c are legal_ids[legal_offsets[c]:legal_offsets[c + 1]]; one id: forced."""
    temperatures: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float64]
    """[R] return of each decision, as selected."""
    advantage_groups: npt.NDArray[np.int32]
    """[R] number of the advantage group, from 0; -1 if rows were not chosen by group."""
    policy_versions: npt.NDArray[np.int32]
    """[R] policy version that sampled each completion."""


def gather(rows: pa.Table, open_shard: Callable[[str], MappedFile]) -> Batch:
    """The batch of `rows`, from a selection or ledger; `open_shard` maps and verifies a shard by name. Raises ShardDamaged if
    a row differs from the published or selected one."""
    chosen = _Chosen(rows, open_shard)
    checksums = chosen.single("checksum", np.uint32)
    foreign = np.flatnonzero(checksums != as_array(rows["checksum"]).to_numpy())
    if len(foreign):
        name, row = rows["shard"][int(foreign[0])].as_py(), rows["row"][int(foreign[0])]
        raise ShardDamaged(f"Shard {name}, row {row} was replaced after it was chosen; restore the run's shards.", name)
    input_ids, n_tokens = chosen.lists("input_ids", np.int32)
    legal_ids, n_legal = chosen.lists("legal_ids", np.int32)
    prompt_lens = chosen.single("prompt_len", np.int32)
    n_completion = n_tokens - prompt_lens
    completion_offsets = _offsets_of(n_completion)
    legal_before = np.repeat(_offsets_of(n_legal)[:-1], n_completion)
    return Batch(
        decision_ids=chosen.single("decision_id", np.int64),
        input_ids=input_ids,
        input_offsets=_offsets_of(n_tokens),
        prompt_lens=prompt_lens,
        behaviour_logprobs=chosen.lists("behaviour_logprobs", np.float32)[0],
        completion_offsets=completion_offsets,
        legal_ids=legal_ids,
        legal_offsets=_rebased(chosen.lists("legal_offsets", np.int32)[0], completion_offsets, legal_before),
        temperatures=chosen.single("temperature", np.float32),
        returns=as_array(rows["return"]).to_numpy().astype(np.float64),
        advantage_groups=as_array(rows["advantage_group"]).to_numpy().astype(np.int32),
        policy_versions=chosen.single("policy_version", np.int32),
    )


class _Chosen:
    """Chosen rows in order, in as few contiguous spans as possible: shard, first row, and end (exclusive)."""

    def __init__(self, rows: pa.Table, open_shard: Callable[[str], MappedFile]) -> None:
        names = rows["shard"].to_pylist()
        self._tables = {name: _verified(name, open_shard(name)) for name in dict.fromkeys(names)}
        self._runs: list[tuple[str, int, int]] = []
        # A plain loop is faster than Arrow and numpy for so few rows.
        for name, row in zip(names, rows["row"].to_pylist(), strict=True):
            if not 0 <= row < self._tables[name].num_rows:
                raise ShardDamaged(f"Shard {name} has no row {row}; the shard is not the one that was chosen from.", name)
            if self._runs and self._runs[-1][0] == name and self._runs[-1][2] == row:
                self._runs[-1] = name, self._runs[-1][1], row + 1
            else:
                self._runs.append((name, row, row + 1))

    def single(self, column: str, kind: type[np.generic]) -> npt.NDArray[Any]:
        values = {name: as_array(table[column]).to_numpy() for name, table in self._tables.items()}
        return _join([values[name][first:after] for name, first, after in self._runs], kind)

    def lists(self, column: str, kind: type[np.generic]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """The lists of all rows, row after row, and [R] their lengths."""
        arrays = {name: as_array(table[column]) for name, table in self._tables.items()}
        parts = {name: (array.offsets.to_numpy(), array.values.to_numpy()) for name, array in arrays.items()}
        pieces, lengths = [], []
        for name, first, after in self._runs:
            offsets, values = parts[name]
            pieces.append(values[offsets[first] : offsets[after]])
            lengths.append(np.diff(offsets[first : after + 1]))
        return _join(pieces, kind), _join(lengths, np.int32)


def _verified(name: str, file: MappedFile) -> pa.Table:
    """The rows of a mapped file, after checking that no byte has changed."""
    if not file.is_unchanged():
        raise ShardDamaged(
            f"Shard {name} changed since it was opened: its checksum is wrong; remove the shard or restore it.", name
        )
    return file.table


def _join(pieces: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate(pieces, dtype=kind) if pieces else np.empty(0, kind)


def _offsets_of(lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[R + 1] start of each row in the concatenated rows."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _rebased(
    bounds: npt.NDArray[np.int32], completion_offsets: npt.NDArray[np.int64], legal_before: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """One CSR over all positions: each row's offsets without the leading 0, plus the legal ids before the row."""
    follow = np.ones(len(bounds), bool)
    follow[completion_offsets[:-1] + np.arange(len(completion_offsets) - 1)] = False
    legal_offsets = np.zeros(len(legal_before) + 1, np.int64)
    np.add(bounds[follow], legal_before, out=legal_offsets[1:])
    return legal_offsets
