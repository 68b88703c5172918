"""Maps the rows of vLLM's V1 batch to slots in the arena, as vLLM moves rows.

V1 passes one growing list of sampled tokens per request. In each step `apply` reads the known part of those lists, samples a
token for each row with a seed, and masks the other rows. No sampled token raises an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entente.decoding.legal_table import LegalTable
from entente.inference.legal_arena import LegalArena
from entente.inference.sampling import seed_array, uniforms


@dataclass(slots=True)
class _Row:
    slot: int
    output: list[int]
    """vLLM's list of this row's sampled tokens, which grows; a negative token is not known yet."""
    sampling: tuple[int, float] | None
    """Seed and temperature; None: vLLM samples."""
    first: int
    """Number of completion tokens in the prompt."""
    marker: int
    """The token that ends its thought; -1: not in a thought."""
    walked: int = 0
    """Number of `output` tokens that its state on the device includes."""


@dataclass(slots=True)
class _Batch:
    size: int
    sampled: list[tuple[int, _Row]]
    """Rows that we sample, with their index."""
    sampled_slots: Tensor
    """int64 [size]: their slots, and 0 for others."""
    seeds: np.ndarray
    """uint64 [sampled rows]."""
    temperatures: Tensor
    """float64 [size]."""
    masked_slots: Tensor | None
    """int64 [size]: slots of the rows that vLLM samples; None: there are none."""


class LegalRows:
    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        # Slot 0 is never assigned: rows without a table use it.
        self._arena = LegalArena(rows + 1, device)
        self._free = list(range(rows, 0, -1))
        self._rows: dict[int, _Row] = {}
        self._batch: _Batch | None = None
        self._walked: tuple[list[int], Tensor] = ([], self._upload([]))
        """The slots that advanced in the last step, which are often those of the next."""

    @property
    def illegal_tokens(self) -> int:
        return self._arena.illegal_tokens

    def add(
        self,
        row: int,
        table: LegalTable | None,
        output: list[int],
        start: int = 0,
        sampling: tuple[int, float] | None = None,
    ) -> None:
        """Assign `row` to a request with `table` (None: unconstrained). Its tokens appear in `output`, the first at node
        `start` (0: the table's start). `sampling`: seed and temperature; None: vLLM samples under the mask."""
        self.remove(row)
        if table is not None:
            first = len(table.forced(0)[0]) if start else 0
            marker = -1 if table.thought is None else int(table.token_ids[0])
            self._rows[row] = _Row(self._free.pop(), output, sampling, first, marker)
            self._arena.assign(self._rows[row].slot, table, start)

    def remove(self, row: int) -> None:
        self._batch = None
        removed = self._rows.pop(row, None)
        if removed is not None:
            self._arena.assign(removed.slot, None)
            self._free.append(removed.slot)

    def move(self, source: int, target: int, swap: bool) -> None:
        self._batch = None
        moved, displaced = self._rows.pop(source, None), self._rows.pop(target, None)
        if moved is not None:
            self._rows[target] = moved
        if displaced is not None:
            self._rows[source] = displaced
            if not swap:
                self.remove(source)

    def apply(self, logits: Tensor) -> Tensor:
        """Change logits float32 [rows, vocabulary] in place: in a seeded row the sampled token's becomes its log-probability, all
        others -inf; in other constrained rows those outside the legal set become -inf."""
        if not self._rows:
            return logits
        self._arena.flush()
        self._walk()
        if self._batch is None or self._batch.size != len(logits):
            self._batch = self._lay_out(len(logits))
        batch = self._batch
        if batch.masked_slots is not None:
            self._arena.mask(logits, batch.masked_slots)
        if not batch.sampled:
            return logits
        places = np.fromiter((row.first + len(row.output) for _, row in batch.sampled), np.int64, len(batch.sampled))
        numbers = np.zeros(batch.size)
        numbers[[index for index, _ in batch.sampled]] = uniforms(batch.seeds, places)
        thinking = [index for index, row in batch.sampled if row.marker >= 0]
        return self._arena.sample(logits, batch.sampled_slots, self._upload(numbers, torch.float64), batch.temperatures, thinking)

    def _lay_out(self, size: int) -> _Batch:
        sampled = [(index, row) for index, row in self._rows.items() if row.sampling is not None and index < size]
        masked = [(index, row) for index, row in self._rows.items() if row.sampling is None and index < size]
        sampled_slots, masked_slots, temperatures = [0] * size, [0] * size, [1.0] * size
        for index, row in masked:
            masked_slots[index] = row.slot
        for index, row in sampled:
            sampled_slots[index] = row.slot
            temperatures[index] = row.sampling[1] if row.sampling else 1.0
        return _Batch(
            size=size,
            sampled=sampled,
            sampled_slots=self._upload(sampled_slots),
            seeds=seed_array([row.sampling[0] for _, row in sampled if row.sampling]),
            temperatures=self._upload(temperatures, torch.float64),
            masked_slots=self._upload(masked_slots) if masked else None,
        )

    def _walk(self) -> None:
        # One round, except for preempted requests that return with tokens.
        while True:
            slots, tokens = [], []
            for row in self._rows.values():
                if row.walked < len(row.output) and (token := row.output[row.walked]) >= 0:
                    row.walked += 1
                    if token == row.marker:
                        row.marker = -1  # the thought has ended
                    slots.append(row.slot)
                    tokens.append(token)
            if not slots:
                return
            if slots != self._walked[0]:
                self._walked = slots, self._upload(slots)
            self._arena.advance(self._walked[1], self._upload(tokens))

    def _upload(self, values: Sequence[float] | np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self._device, non_blocking=True)
