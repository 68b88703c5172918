"""Shards as they lie in memory: views of the columns that gathering reads, over files that stay mapped for a while.

Promise: nothing is copied; the views lie in the mapped file. A shard is mapped, and verified row by row, when one of its rows is
first asked for, and no more than a fixed number stay mapped, as the kernel limits a process's mappings; one that is let go lives
on while somebody reads it. Any thread may ask.
Never: choose rows, or hand on a shard that cannot be verified.
"""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.arrow_files import MappedFile
from storage.schema import as_array
from storage.shards import map_shard
from telemetry.errors import DataError

MAPPED = 64
"""Shards kept mapped: those of a staleness budget, and few enough that a trainer does not seem to grow, for what is mapped counts
as resident. Linux allows a process 65,530 mappings, and a long run has more shards."""


class ShardDamaged(DataError):
    """Chosen rows cannot be had from their shard; ``shard`` names its file below ``shards/``."""

    def __init__(self, sentence: str, shard: str) -> None:
        super().__init__(sentence)
        self.shard = shard


class MappedShard:
    """The decisions of one shard.

    Attributes:
        name: its file below ``shards/``.
        n_rows: how many there are.
        columns: every column of single numbers.
        lists: every list of numbers: [rows + 1] where each row's begins, and the values of all rows.
    """

    def __init__(self, name: str, file: MappedFile) -> None:
        self.name = name
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
    """The shards of one run, mapped as they are asked for."""

    def __init__(self, folder: Path, bound: int = MAPPED) -> None:
        """``folder`` is the run's ``shards/``; at most ``bound`` stay mapped, those asked for last."""
        self._folder = folder
        self._bound = bound
        self._mapped: OrderedDict[str, MappedShard] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._mapped)

    def get(self, name: str) -> MappedShard:
        """The shard of this name.

        Raises:
            ShardDamaged: it is missing, or cannot be verified.
        """
        with self._lock:
            if name in self._mapped:
                self._mapped.move_to_end(name)
                return self._mapped[name]
        try:
            return self.keep(name, map_shard(self._folder / name))
        except DataError as error:
            raise ShardDamaged(str(error), name) from error

    def keep(self, name: str, file: MappedFile) -> MappedShard:
        """Hold on to a shard that was just verified."""
        shard = MappedShard(name, file)
        with self._lock:
            self._mapped[name] = shard
            self._mapped.move_to_end(name)
            while len(self._mapped) > self._bound:
                self._mapped.popitem(last=False)
        return shard

    def drop(self, name: str) -> None:
        """Let go of a shard, if it is mapped."""
        with self._lock:
            self._mapped.pop(name, None)
