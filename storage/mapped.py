"""Mapped shards: numpy views of the columns that gathering reads.

Nothing is copied. A shard is mapped, and every row verified, when one of its rows is first needed. A fixed number of shards
stay mapped, because the kernel limits a process's mappings. A shard that is dropped stays valid while somebody reads it. Any
thread may call.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entente.telemetry.errors import DataError
from storage.arrow_files import MappedFile
from storage.schema import as_array
from storage.shards import map_shard

MAPPED = 64
"""Shards that stay mapped: enough for a staleness budget, and few, because mapped pages count as resident memory. Linux allows
a process 65,530 mappings, and a long run has more shards.
"""


class ShardDamaged(DataError):
    """Chosen rows cannot be read from their shard; `shard` is its name below `shards/`."""

    def __init__(self, sentence: str, shard: str) -> None:
        super().__init__(sentence)
        self.shard = shard


class MappedShard:
    """The decisions of one shard.

    Attributes:
        name: its file below `shards/`.
        table: all columns, as mapped.
        n_rows: number of rows.
        columns: scalar columns [rows].
        lists: list columns: offsets [rows + 1] and the values of all rows.
    """

    def __init__(self, name: str, file: MappedFile) -> None:
        self.name = name
        self.table = file.table
        self.n_rows = file.table.num_rows
        self.is_unchanged = file.is_unchanged
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self.lists: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[Any]]] = {}
        for column in _COLUMNS:
            self.columns[column] = as_array(file.table[column]).to_numpy()
        for column in _LISTS:
            array = as_array(file.table[column])
            self.lists[column] = array.offsets.to_numpy(), array.values.to_numpy()


_COLUMNS = ("decision_id", "prompt_len", "temperature", "policy_version", "checksum")
_LISTS = ("input_ids", "behaviour_logprobs", "legal_ids", "legal_offsets")


class MappedShards:
    """The shards of one run, mapped on demand."""

    def __init__(self, folder: Path, bound: int = MAPPED) -> None:
        """At most `bound` shards of the run's `shards/` folder stay mapped, those used last."""
        self._folder = folder
        self._bound = bound
        self._mapped: OrderedDict[str, MappedShard] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._mapped)

    def get(self, name: str) -> MappedShard:
        """The shard of this name."""
        with self._lock:
            if name in self._mapped:
                self._mapped.move_to_end(name)
                return self._mapped[name]
        try:
            return self.keep(name, map_shard(self._folder / name))
        except DataError as error:
            raise ShardDamaged(str(error), name) from error

    def keep(self, name: str, file: MappedFile) -> MappedShard:
        """Add a shard that was just verified."""
        shard = MappedShard(name, file)
        with self._lock:
            self._mapped[name] = shard
            self._mapped.move_to_end(name)
            while len(self._mapped) > self._bound:
                self._mapped.popitem(last=False)
        return shard

    def drop(self, name: str) -> None:
        """Forget a shard, if it is mapped."""
        with self._lock:
            self._mapped.pop(name, None)
