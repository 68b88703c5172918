"""Selects the distillation targets of a trainer's step, and gathers them into arrays. Computes no loss.

Ledgers count the uses of a target. The same files, ledgers and seed select the same targets. A file is verified when opened
and its bytes are compared again before each use; a damaged one is set aside with a sentence.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.arrow_files import DISTIL_TARGET_SCHEMA, MappedFile, as_array
from storage.distil_targets import DistilTargetRef, recorded_distil_targets
from storage.files import names_in, set_aside
from storage.gather import Batch, MappedShards, ShardDamaged, join, offsets_of, verified
from storage.ledger import ledgers_after
from storage.runs import RunPaths, check_name

MAX_FILES = 10_000
"""Files that stay mapped: each selection reads all of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilQuery:
    round: str
    """Name of the round, a folder below `distil_targets/`."""
    count: int
    max_uses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilBatch:
    """Targets as arrays: one row per proposal to which the teacher gives a positive probability."""

    batch: Batch
    """R rows: `advantage_groups` numbers the targets from 0, `decision_ids` holds distillation target ids; `returns` and
    `behaviour_logprobs` are unused and 0."""
    weights: npt.NDArray[np.float32]
    """[R] the teacher's probability of each row."""


def distil_target_uses(paths: RunPaths) -> Counter[int]:
    return Counter(
        distil_target.distil_target_id for ledger in ledgers_after(paths, 0) for distil_target in recorded_distil_targets(ledger)
    )


def distil_targets_in_use(paths: RunPaths, round_name: str) -> int:
    """Targets in the files of a round if a ledger names one of them, else 0."""
    store = DistilStore(paths, 0)
    uses, known = distil_target_uses(paths), store._known(round_name)
    return len(known) if any(uses[distil_target.distil_target_id] for distil_target in known) else 0


def choose_distil_targets(
    known: Mapping[DistilTargetRef, str], uses: Mapping[int, int], query: DistilQuery, seed: int
) -> list[DistilTargetRef]:
    """The targets of one step: at most `query.count` with fewer than `query.max_uses` uses, least used first.

    Sorted by place, and deterministic in these and the seed. `known` maps to snapshot ids. Decisions of a position come
    together: with `prompts.own_line` "in_place" their prompts share the board, which the trainer computes once.
    """

    def order(distil_target: DistilTargetRef) -> tuple[int, bytes, int]:
        used = uses.get(distil_target.distil_target_id, 0)
        return (
            used,
            blake2b(f"{seed}/{used}/{known[distil_target]}".encode(), digest_size=8).digest(),
            distil_target.distil_target_id,
        )

    left = [distil_target for distil_target in known if uses.get(distil_target.distil_target_id, 0) < query.max_uses]
    return sorted(sorted(left, key=order)[: query.count], key=lambda distil_target: (distil_target.shard, distil_target.row))


class DistilStore:
    """A trainer's verified distillation targets and their use counts; `refused` has one sentence per file that was set aside."""

    def __init__(self, paths: RunPaths, seed: int) -> None:
        self.refused: list[str] = []
        self._paths, self._seed = paths, seed
        self._files = MappedShards(paths.distil_targets, DISTIL_TARGET_SCHEMA, bound=MAX_FILES)
        self._uses: Counter[int] | None = None  # read when it is first needed: few runs have distillation targets

    def choose(self, query: DistilQuery) -> list[DistilTargetRef]:
        """The targets for a step, as in `choose_distil_targets`; sets damaged files aside."""
        return choose_distil_targets(self._known(query.round), self._counted(), query, self._seed)

    def left(self, query: DistilQuery) -> int:
        uses = self._counted()
        return sum(max(0, query.max_uses - uses[distil_target.distil_target_id]) for distil_target in self._known(query.round))

    def count(self, distil_targets: Sequence[DistilTargetRef]) -> None:
        """Count one use of each, after its step's ledger was written."""
        self._counted().update(distil_target.distil_target_id for distil_target in distil_targets)

    def gather(self, distil_targets: Sequence[DistilTargetRef]) -> DistilBatch:
        """Verified arrays in this order. Raises ShardDamaged if a target is missing, damaged or not the selected one; sets a
        damaged file aside."""
        files = {
            shard: self._open(shard, again=True)
            for shard in dict.fromkeys(distil_target.shard for distil_target in distil_targets)
        }
        for distil_target in distil_targets:
            sums = files[distil_target.shard].sums
            if distil_target.row >= len(sums) or int(sums[distil_target.row]) != distil_target.checksum:
                raise ShardDamaged(
                    f"Distillation targets {distil_target.shard}, row {distil_target.row} were replaced after they "
                    "were chosen; restore the run's distillation targets.",
                    distil_target.shard,
                )
        return _batch_of([(files[distil_target.shard].table, distil_target) for distil_target in distil_targets])

    def _counted(self) -> Counter[int]:
        if self._uses is None:
            self._uses = distil_target_uses(self._paths)
        return self._uses

    def _known(self, round_name: str) -> dict[DistilTargetRef, str]:
        """All targets of a round, each with its position's snapshot id."""
        known: dict[DistilTargetRef, str] = {}
        for name in sorted(names_in(self._paths.distil_targets / check_name(round_name, "The round"))):
            shard = f"{round_name}/{name}"
            try:
                file = self._open(shard)
            except ShardDamaged:
                continue
            ids, positions = (as_array(file.table[name]).to_pylist() for name in ("distil_target_id", "snapshot_id"))
            rows = enumerate(zip(ids, file.sums.tolist(), positions, strict=True))
            known |= {DistilTargetRef(shard, row, number, checksum): position for row, (number, checksum, position) in rows}
        return known

    def _open(self, shard: str, *, again: bool = False) -> MappedFile:
        """The mapped file; sets a damaged one aside. `again`: check that no byte has changed since it was mapped."""
        try:
            file = self._files.get(shard)
            if again:
                verified(shard, file)
        except ShardDamaged as error:
            self._files.drop(shard)
            if (path := self._paths.distil_targets / shard).exists():
                set_aside(path)
            self.refused.append(str(error))
            raise
        return file


def _batch_of(sources: Sequence[tuple[pa.Table, DistilTargetRef]]) -> DistilBatch:
    ids, legal, sizes, lengths, weights, owners = [], [], [], [], [], []
    for number, (table, distil_target) in enumerate(sources):
        prompt, tokens, legal_ids = (
            _list(table, name, distil_target.row) for name in ("prompt_ids", "completion_ids", "legal_ids")
        )
        ends, sets = (_list(table, name, distil_target.row) for name in ("completion_offsets", "legal_offsets"))
        probabilities = _list(table, "probabilities", distil_target.row)
        for proposal in np.flatnonzero(probabilities > 0).tolist():
            first, after = ends[proposal], ends[proposal + 1]
            ids += [prompt, tokens[first:after]]
            legal.append(legal_ids[sets[first] : sets[after]])
            sizes.append(np.diff(sets[first : after + 1]))
            lengths.append((len(prompt), after - first))
            weights.append(probabilities[proposal])
            owners.append(number)
    prompts, completions = np.array(lengths, np.int64).reshape(-1, 2).T
    owner, completion_offsets = np.array(owners, np.int32), offsets_of(completions)

    def of_distil_target(column: str, kind: type[np.generic]) -> npt.NDArray[Any]:
        return np.array([as_array(table[column])[distil_target.row].as_py() for table, distil_target in sources], kind)[owner]

    batch = Batch(
        decision_ids=of_distil_target("distil_target_id", np.int64),
        input_ids=join(ids, np.int32),
        input_offsets=offsets_of(prompts + completions),
        prompt_lens=prompts.astype(np.int32),
        behaviour_logprobs=np.zeros(int(completion_offsets[-1]), np.float32),
        completion_offsets=completion_offsets,
        legal_ids=join(legal, np.int32),
        legal_offsets=offsets_of(join(sizes, np.int64)),
        temperatures=of_distil_target("temperature", np.float32),
        returns=np.zeros(len(owner)),
        advantage_groups=owner,
        policy_versions=of_distil_target("policy_version", np.int32),
    )
    return DistilBatch(batch=batch, weights=np.array(weights, np.float32))


def _list(table: pa.Table, column: str, row: int) -> npt.NDArray[Any]:
    array = as_array(table[column])
    return array.values.to_numpy()[array.offsets[row].as_py() : array.offsets[row + 1].as_py()]
