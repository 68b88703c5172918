"""Maps the rows of vLLM's V1 batch to slots in the arena, as vLLM moves rows.

V1 gives one list of sampled tokens for each request, to which it keeps appending. Before each step `mask` reads the known part
of those lists and then masks the whole batch. No sampled token makes it raise.

Tables are walked on the engine's device, or on the host if `jump` is used: `jump` needs a row's state before the next pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from decoding.legal_table import END, LegalTable
from inference.legal_arena import LegalArena
from telemetry.errors import DataError


@dataclass(slots=True)
class _Row:
    slot: int
    table: LegalTable
    output: list[int]
    """vLLM's list of this row's sampled tokens, which grows; a negative token is not known yet."""
    state: int | None
    """Its state in the table, if rows are walked on the host; None once it left its table."""
    walked: int = 0
    """Number of tokens of `output` that its state reflects."""
    changed: bool = False
    """Whether its state differs from the one on the device."""

    def walk(self) -> None:
        """Advance the state by the new tokens of `output`."""
        for token in self.output[self.walked :]:
            self.changed = True
            if self.state is not None and self.state != END:
                try:
                    self.state = self.table.advance(self.state, token)
                except DataError:
                    self.state = None
        self.walked = len(self.output)


class LegalRows:
    """The rows that have a table, by their index in the batch."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        # Slot 0 is never assigned: rows without a table use it.
        self._arena = LegalArena(rows + 1, device)
        self._free = list(range(rows, 0, -1))
        self._rows: dict[int, _Row] = {}
        self._on_host = False
        """Rows are walked on the host instead of on the device."""
        self._batch: Tensor | None = None
        """Slot of each row; None after the batch changed."""
        self._walked: tuple[list[int], Tensor] = ([], self._upload([]))
        """The slots that advanced in the last step, which are often those of the next."""

    @property
    def illegal_tokens(self) -> int:
        """Requests that sampled a token outside their table; must stay 0."""
        return self._arena.illegal_tokens

    def add(self, row: int, table: LegalTable | None, output: list[int], start: int = 0) -> None:
        """Assign `row` to a request with `table` (None: unconstrained). Its tokens appear in `output`, the first at node `start`
        (0: at the table's start)."""
        self.remove(row)
        if table is not None:
            self._rows[row] = _Row(self._free.pop(), table, output, start or table.start)
            self._arena.assign(self._rows[row].slot, table, start)

    def remove(self, row: int) -> None:
        """Free `row`."""
        self._batch = None
        removed = self._rows.pop(row, None)
        if removed is not None:
            self._arena.assign(removed.slot, None)
            self._free.append(removed.slot)

    def move(self, source: int, target: int, swap: bool) -> None:
        """Move row `source` to `target`; with `swap`, exchange the two."""
        self._batch = None
        moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if displaced is not None:
            self._rows[source] = displaced
            if not swap:
                self.remove(source)

    def mask(self, logits: Tensor) -> Tensor:
        """Set logits [rows, vocabulary] to -inf in place outside each constrained row's legal set."""
        if not self._rows:
            return logits
        self._arena.flush()
        if self._on_host:
            self._walk_on_host()
        else:
            self._walk_on_device()
        if self._batch is None or len(self._batch) != len(logits):
            slots = [0] * len(logits)
            for index, row in self._rows.items():
                if index < len(slots):
                    slots[index] = row.slot
            self._batch = self._upload(slots)
        return self._arena.mask(logits, self._batch)

    def walk_on_host(self, on_host: bool) -> None:
        """Walk rows on the host, as `jump` requires, or on the device. Removes all rows; their requests must have ended."""
        for row in list(self._rows):
            self.remove(row)
        self._on_host = on_host

    def jump(self, most: int) -> dict[int, list[int]]:
        """Append the forced tokens that follow each newly sampled token to the rows' outputs; returns them by row.

        A row whose completion continues gets at most `most` tokens, because one pass computes them.
        """
        jumps = {}
        for index, row in self._rows.items():
            if row.walked == len(row.output):
                continue
            row.walk()
            if row.state is None or row.state == END:
                continue
            tokens, after = row.table.forced(row.state)
            if len(tokens) > most and after != END:
                tokens = tokens[:most]
            if tokens:
                row.output += tokens
                row.walk()
                jumps[index] = tokens
        return jumps

    def _walk_on_host(self) -> None:
        for row in self._rows.values():
            row.walk()
        changed = [row for row in self._rows.values() if row.changed]
        if changed:
            self._arena.set_states([row.slot for row in changed], [row.state for row in changed])
            for row in changed:
                row.changed = False

    def _walk_on_device(self) -> None:
        # One round, except for preempted requests that return with tokens.
        while True:
            slots, tokens = [], []
            for row in self._rows.values():
                if row.walked < len(row.output) and (token := row.output[row.walked]) >= 0:
                    row.walked += 1
                    slots.append(row.slot)
                    tokens.append(token)
            if not slots:
                return
            if slots != self._walked[0]:
                self._walked = slots, self._upload(slots)
            self._arena.advance(self._walked[1], self._upload(tokens))

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)
