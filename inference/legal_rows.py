"""Where each row of a decode batch stands in its legal-order table: the pure core of every logits processor.

Rows are added, moved and removed as the engine repacks its batch. Before each step, `gather` says which (row, token) pairs
stay finite. It reads the engine's own list of output tokens, so it can never disagree with what was sampled.
It knows nothing of torch or vllm and never raises on a sampled token: a row that left its table is set free to end, and named.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from decoding.legal_table import END, LegalTable
from telemetry.errors import DataError


class TableMemo:
    """Decodes tables from the bytes that came with a request; forks share bytes, so each is parsed once. Bounded."""

    def __init__(self, vocabulary_size: int, size: int = 1024) -> None:
        self._vocabulary_size = vocabulary_size
        self._size = size
        self._tables: OrderedDict[bytes, LegalTable] = OrderedDict()

    def get(self, data: bytes) -> LegalTable:
        """The table spelled by `data`.

        Raises:
            DataError: it is not a table.
        """
        table = self._tables.get(data)
        if table is None:
            table = self._tables[data] = LegalTable.from_bytes(data, self._vocabulary_size)
            if len(self._tables) > self._size:
                self._tables.popitem(last=False)
        return table


@dataclass(slots=True)
class _Row:
    table: LegalTable
    output: list[int]
    """The engine's live list of this row's sampled tokens."""
    node: int = 0
    seen: int = 0
    """How many tokens of `output` the node already reflects."""


@dataclass(slots=True)
class LegalRows:
    """Row index -> automaton state, for the rows that carry a table."""

    rows: dict[int, _Row] = field(default_factory=dict)
    strays: int = 0
    """Tokens sampled outside their table; must stay 0."""

    def add(self, row: int, table: LegalTable | None, output: list[int]) -> None:
        """Row `row` now belongs to a request with `table` (None: unconstrained), whose tokens appear in `output`."""
        if table is None:
            self.rows.pop(row, None)
        else:
            self.rows[row] = _Row(table, output)

    def remove(self, row: int) -> None:
        """Row `row` is free."""
        self.rows.pop(row, None)

    def move(self, source: int, target: int, swap: bool) -> None:
        """Row `source` becomes row `target`; with `swap` the other way round too."""
        moved, displaced = self.rows.pop(source, None), self.rows.pop(target, None)
        if moved is not None:
            self.rows[target] = moved
        if swap and displaced is not None:
            self.rows[source] = displaced

    def gather(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows under a table and their allowed tokens, for the next position.

        Returns:
            constrained rows int64 [r]; row index int64 [pairs] and token id int64 [pairs] of everything allowed.
        """
        constrained, counts, allowed = [], [], []
        for index, row in self.rows.items():
            for token in row.output[row.seen :]:
                try:
                    row.node = row.table.advance(row.node, token)
                except DataError:
                    self.strays += 1
                    row.node = END
            row.seen = len(row.output)
            if row.node == END:
                continue
            tokens = row.table.allowed(row.node)
            constrained.append(index)
            counts.append(len(tokens))
            allowed.append(tokens)
        if not constrained:
            empty = np.empty(0, np.int64)
            return empty, empty, empty
        rows = np.asarray(constrained, np.int64)
        return rows, np.repeat(rows, counts), np.concatenate(allowed).astype(np.int64)
