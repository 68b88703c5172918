"""A shard as it lies in memory: views of its columns, and a mark by which a later change of any of its bytes is seen.

Promise: nothing is copied; the views lie in the mapped file. The mark is taken as soon as the shard was verified row by row, so a
shard whose bytes still have it is as it was verified; looking takes a fraction of checking its rows again.
Never: open a file or choose rows.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.schema import as_array

_Lists = tuple[npt.NDArray[np.int32], npt.NDArray[Any]]


class MappedShard:
    """The decisions of one shard, which the caller has just verified.

    Attributes:
        table: all of it.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._bytes = list(_bytes_of(table))
        self._mark = self._sum()
        self._flat: dict[str, npt.NDArray[Any]] = {}
        self._lists: dict[str, _Lists] = {}

    def as_verified(self) -> bool:
        """True if no byte of it has changed since."""
        return self._sum() == self._mark

    def flat(self, column: str) -> npt.NDArray[Any]:
        """[rows] a column of single numbers."""
        if column not in self._flat:
            self._flat[column] = as_array(self.table[column]).to_numpy()
        return self._flat[column]

    def lists(self, column: str) -> _Lists:
        """[rows + 1] where each row's list begins, and the values of all rows."""
        if column not in self._lists:
            array = as_array(self.table[column])
            self._lists[column] = array.offsets.to_numpy(), array.values.to_numpy()
        return self._lists[column]

    def _sum(self) -> int:
        mark = 0
        for part in self._bytes:
            mark = zlib.crc32(part, mark)
        return mark


def _bytes_of(table: pa.Table) -> Iterator[memoryview]:
    """All that lies behind the columns, dictionaries too."""
    for column in table.columns:
        array = as_array(column)
        parts = [array.indices, array.dictionary] if pa.types.is_dictionary(array.type) else [array]
        for part in parts:
            yield from (memoryview(buffer) for buffer in part.buffers() if buffer is not None)
