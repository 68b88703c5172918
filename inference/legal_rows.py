"""The rows of vLLM's V1 batch, followed through every repacking to their slots in the arena.

V1 moves rows about and shows the sampled tokens as a list for each request, which it goes on writing to. Before each step
`mask` reads those lists as far as they are known, so it can never disagree with what was sampled, then masks the whole batch.
It raises on nothing that was sampled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.legal_table import LegalTable
from inference.legal_arena import LegalArena


@dataclass(slots=True)
class _Row:
    slot: int
    output: list[int]
    """The engine's live list of this row's sampled tokens; a negative one is not known yet."""
    seen: int = 0
    """How many tokens of `output` the slot's node already reflects."""


class LegalRows:
    """Row index -> slot, for the rows that carry a table."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        # One slot more, which is never assigned: that of all rows without a table.
        self._arena = LegalArena(rows + 1, device)
        self._free = list(range(rows, 0, -1))
        self._rows: dict[int, _Row] = {}
        self._batch: Tensor | None = None
        """Slot of each row; None once the batch has changed."""
        self._walked: tuple[list[int], Tensor] = ([], self._upload([]))
        """The slots that went on in the last step, which mostly are those of the next."""

    @property
    def strays(self) -> int:
        """Tokens sampled outside their table; must stay 0."""
        return self._arena.strays

    def add(self, row: int, table: LegalTable | None, output: list[int]) -> None:
        """Row `row` now belongs to a request with `table` (None: unconstrained), whose tokens appear in `output`."""
        self.remove(row)
        if table is not None:
            self._rows[row] = _Row(self._free.pop(), output)
            self._arena.assign(self._rows[row].slot, table)

    def remove(self, row: int) -> None:
        """Row `row` is free."""
        self._batch = None
        gone = self._rows.pop(row, None)
        if gone is not None:
            self._arena.assign(gone.slot, None)
            self._free.append(gone.slot)

    def move(self, source: int, target: int, swap: bool) -> None:
        """Row `source` becomes row `target`; with `swap` the other way round too."""
        self._batch = None
        moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if displaced is not None:
            self._rows[source] = displaced
            if not swap:
                self.remove(source)

    def mask(self, logits: Tensor) -> Tensor:
        """logits [rows, vocabulary], changed in place: -inf outside each constrained row's legal set."""
        if not self._rows:
            return logits
        self._arena.flush()
        self._read_outputs()
        if self._batch is None or len(self._batch) != len(logits):
            slots = [0] * len(logits)
            for index, row in self._rows.items():
                if index < len(slots):
                    slots[index] = row.slot
            self._batch = self._upload(slots)
        return self._arena.mask(logits, self._batch)

    def _read_outputs(self) -> None:
        # One round but for requests that come back with tokens, after they were put aside.
        while True:
            slots, tokens = [], []
            for row in self._rows.values():
                if row.seen < len(row.output) and (token := row.output[row.seen]) >= 0:
                    row.seen += 1
                    slots.append(row.slot)
                    tokens.append(token)
            if not slots:
                return
            if slots != self._walked[0]:
                self._walked = slots, self._upload(slots)
            self._arena.advance(self._walked[1], self._upload(tokens))

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)
