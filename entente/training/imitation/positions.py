"""The positions of a teacher's games and of labels: training, held out, and those of a step.

Shards are memory-mapped. Whole games are held out, because positions of one game are alike. A step's positions depend only on
seed and step: each epoch is a permutation.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from entente.game.board import Board
from entente.game.snapshot import make_snapshot
from entente.telemetry.errors import DataError, InputError
from entente.training.imitation.teacher_games import READ, RECORDED
from storage.arrow_files import PHASE_SCHEMA, map_arrow, metadata_of
from storage.files import names_in

HELD_OUT_EVERY = 20
"""One game in this many, from the first on, so that more games do not move a game to the other part; of recorded games by what
was played, which the order of the files does not change."""


class Positions:
    """Positions by number, over all shards, those of labels last; `training` and `held_out` are int64 [positions]."""

    def __init__(self, folder: Path, games: int | None = None, labelled: Sequence[pa.Table] = ()) -> None:
        """Map and verify the shards, up to the first `games` games. `labelled`: as `read_labels` gives them.

        Raises DataError if a shard is missing or damaged, and InputError if there is nothing to train on or to hold out."""
        names = sorted(name for name in names_in(folder) if games is None or int(name.partition(".")[0]) < games)
        played: list[pa.Table] = [_map_shard(folder / name) for name in names]
        self._tables = [*played, *labelled]
        self._starts = np.cumsum([0, *(table.num_rows for table in self._tables)])
        self.first_label = int(self._starts[len(played)])
        columns = [*(table["start_group"] for table in played), *(table["game"] for table in labelled)]
        numbers = np.concatenate([np.zeros(0, np.int64), *(column.to_numpy() for column in columns)])
        used = np.arange(len(numbers)) >= self.first_label
        used |= numbers < games if games is not None else True
        held_out = numbers % HELD_OUT_EVERY == 0
        if played and all(READ in metadata_of(table) for table in played):
            held_out[: self.first_label] = np.isin(numbers[: self.first_label], _recorded_held_out(played))
        self.training, self.held_out = np.flatnonzero(used & ~held_out), np.flatnonzero(used & held_out)
        for part in (self.training, self.held_out):
            if not len(part) or (labelled and part[-1] < self.first_label):
                raise InputError(
                    f"the games in '{folder}' or the labels are too few: imitation trains on some and holds out one in "
                    f"{HELD_OUT_EVERY}, game 0 first"
                )
        self._epoch = lru_cache(maxsize=2)(self._permuted)

    def board(self, number: int) -> tuple[Board, dict[str, list[str]]]:
        """With the teacher's orders for some or all powers."""
        shard = int(np.searchsorted(self._starts, number, side="right")) - 1
        table, row = self._tables[shard], int(number - self._starts[shard])
        position, phase = table["position"][row].as_py(), table["phase"][row].as_py()
        board = Board.restore(make_snapshot(position, phase, source="", game_id="", seed=0))
        orders = table["orders"][row].as_py()
        if number < self.first_label:
            return board, json.loads(orders)
        return board, {table["power"][row].as_py(): orders[table["best"][row].as_py()].split("; ")}

    def of_step(self, step: int, count: int, seed: int) -> list[int]:
        size = len(self.training)
        return [int(self._epoch(seed, at // size)[at % size]) for at in range(step * count, (step + 1) * count)]

    def spread(self, *, held_out: bool, labels: bool | None = None) -> Iterator[int]:
        """In an order in which any first ones are a fair sample. `labels`: of these alone, or none of them."""
        numbers = self.held_out if held_out else self.training
        if labels is not None:
            numbers = numbers[(numbers >= self.first_label) == labels]
        yield from np.random.default_rng(0).permutation(numbers).tolist()

    def _permuted(self, seed: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(self.training)


def _recorded_held_out(shards: Sequence[pa.Table]) -> list[int]:
    """Numbers of the held-out recorded games; of few games at least one, and not all."""
    digests = {
        table["start_group"][0].as_py() + place: int(digest, 16)
        for table in shards
        for place, digest in enumerate(json.loads(metadata_of(table)[READ])["seen"])
    }
    numbers = [number for number, digest in digests.items() if digest % HELD_OUT_EVERY == 0]
    return numbers if 0 < len(numbers) < len(digests) else [min(digests, key=digests.__getitem__)]


def _map_shard(path: Path) -> pa.Table:
    """Raises DataError if it is damaged, or a copy of another one, whose games would count twice."""
    cure = f"remove {'its folder' if path.parent.name.startswith(RECORDED) else 'it'}; its games are made again."
    table = map_arrow(path, PHASE_SCHEMA, cure).table
    if (first := table["start_group"][0].as_py()) != int(path.stem):
        raise DataError(f"{path} holds the games from {first} on: it is a copy or was renamed; {cure}")
    return table
