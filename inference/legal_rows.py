"""The rows of vLLM's V1 batch, followed through every repacking to their slots in the arena.

V1 moves rows about and shows the sampled tokens as a list for each request, which it goes on writing to. Before each step
`mask` reads those lists as far as they are known, so it can never disagree with what was sampled, then masks the whole batch.
It raises on nothing that was sampled.

Rows are walked on the engine's device, where sampled tokens lie; or here, once `jump` is asked what must follow them, which is
known before the model has seen it.
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
    """The engine's live list of this row's sampled tokens; a negative one is not known yet."""
    node: int | None
    """Where it stands, if rows are walked here; None once it has left its table."""
    seen: int = 0
    """How many tokens of `output` its node already reflects."""
    moved: bool = False
    """It stands elsewhere than the device knows."""

    def walk(self) -> None:
        """Take what `output` shows by now."""
        for token in self.output[self.seen :]:
            self.moved = True
            if self.node is not None and self.node != END:
                try:
                    self.node = self.table.advance(self.node, token)
                except DataError:
                    self.node = None
        self.seen = len(self.output)


class LegalRows:
    """Row index -> slot, for the rows that carry a table."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        # One slot more, which is never assigned: that of all rows without a table.
        self._arena = LegalArena(rows + 1, device)
        self._free = list(range(rows, 0, -1))
        self._rows: dict[int, _Row] = {}
        self._here = False
        """Rows are walked here instead of on the device."""
        self._batch: Tensor | None = None
        """Slot of each row; None once the batch has changed."""
        self._walked: tuple[list[int], Tensor] = ([], self._upload([]))
        """The slots that went on in the last step, which mostly are those of the next."""

    @property
    def strays(self) -> int:
        """Tokens sampled outside their table; must stay 0."""
        return self._arena.strays

    def add(self, row: int, table: LegalTable | None, output: list[int], start: int = 0) -> None:
        """Row `row` now belongs to a request with `table` (None: unconstrained), whose tokens appear in `output`.

        The first of them is drawn at node `start`.
        """
        self.remove(row)
        if table is not None:
            self._rows[row] = _Row(self._free.pop(), table, output, start)
            self._arena.assign(self._rows[row].slot, table, start)

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
        if self._here:
            self._read_here()
        else:
            self._read_outputs()
        if self._batch is None or len(self._batch) != len(logits):
            slots = [0] * len(logits)
            for index, row in self._rows.items():
                if index < len(slots):
                    slots[index] = row.slot
            self._batch = self._upload(slots)
        return self._arena.mask(logits, self._batch)

    def walk_here(self, here: bool) -> None:
        """Rows are walked here from now on, so that `jump` may be asked, or on the device; those that there are have ended."""
        for row in list(self._rows):
            self.remove(row)
        self._here = here

    def jump(self, most: int) -> dict[int, list[int]]:
        """What must follow the tokens that have just been sampled, by row; it is appended to the rows' outputs.

        At most `most` tokens of a row that goes on after them: they will be computed together, and a pass has room for so many.
        """
        jumps = {}
        for index, row in self._rows.items():
            if row.seen == len(row.output):
                continue
            row.walk()
            if row.node is None or row.node == END:
                continue
            tokens, after = row.table.forced(row.node)
            if len(tokens) > most and after != END:
                tokens = tokens[:most]
            if tokens:
                row.output += tokens
                row.walk()
                jumps[index] = tokens
        return jumps

    def _read_here(self) -> None:
        for row in self._rows.values():
            row.walk()
        moved = [row for row in self._rows.values() if row.moved]
        if moved:
            self._arena.put([row.slot for row in moved], [row.node for row in moved])
            for row in moved:
                row.moved = False

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
