"""Reads whole start groups of a run and gives their rows new numbers, for simulated rollouts.

Only complete start groups drawn by the base model are used. A renumbered row gets a new decision id, start group, version and
hash; its other values stay, except its timings, which are 0. Damaged shards are skipped.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa

from records.generation import GenerationCost
from records.policy_version import PolicyVersion
from records.rows import Decision, Ply, decision_id
from storage.arrow_files import metadata_of
from storage.files import FILES
from storage.runs import RunPaths
from storage.schema import as_array
from storage.shards import SHARD_NAME, open_plies, open_shard
from telemetry.errors import DataError, InputError

GROUPS_KEPT = 64
"""Start groups held in memory; enough to replay them repeatedly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A start group of an earlier run."""

    decisions: tuple[Decision, ...]
    """In the order of their shard."""
    plies: tuple[Ply, ...]
    """Plies of the same forks."""

    def renumbered(self, producer: str, number: int, *, policy: PolicyVersion, worker: str) -> tuple[list[Decision], list[Ply]]:
        """The same rows as start group `number` of `producer`, as if `policy` had drawn them in no time."""
        decisions = [
            replace(
                row,
                decision_id=decision_id(producer, number, row.fork, row.ply, row.power),
                start_group=number,
                policy_version=policy.version,
                adapter_hash=policy.adapter_hash,
                worker=worker,
                **asdict(GenerationCost()),
            )
            for row in self.decisions
        ]
        return decisions, [replace(ply, start_group=number) for ply in self.plies]


def stored_groups(paths: RunPaths, same: Mapping[str, str], *, most: int = GROUPS_KEPT) -> list[StoredGroup]:
    """Up to `most` complete start groups of a run that the base model drew, lowest numbers first.

    Args:
        same: shard metadata that must be equal, such as the base model's fingerprint.

    Raises:
        InputError: the run has none, or was played with another model.
    """
    run, found, damaged = paths.root, list[StoredGroup](), list[str]()
    for producer in sorted(FILES.folders(paths.shards)):
        folder = paths.shards / producer
        for name in sorted(name for name in FILES.names(folder) if SHARD_NAME.fullmatch(name)):
            try:
                decisions = open_shard(folder / name)
                plies = open_plies(folder / name, decisions)
            except DataError as error:
                damaged.append(str(error))
                continue
            metadata = metadata_of(decisions)
            for entry, wanted in same.items():
                if metadata.get(entry) != wanted:
                    raise InputError(
                        f"the rollouts of '{run}' cannot be replayed here: they were made with {entry.replace('_', ' ')} "
                        f"{metadata.get(entry, 'unknown')}, this run has {wanted}; name a run of the same model"
                    )
            found += _groups(decisions, plies)
            if len(found) >= most:
                return found[:most]
    if not found:
        why = f" ({damaged[0]})" if damaged else ""
        raise InputError(
            f"'{run}' has no whole start group that its base drew{why}: name a run that played at least one step, "
            "and whose shards are still there"
        )
    return found


def _groups(decisions: pa.Table, plies: pa.Table) -> list[StoredGroup]:
    """The usable start groups of a shard."""
    rows: dict[int, list[Decision]] = {}
    for row in _rows(decisions, Decision, {"input_ids", "behaviour_logprobs", "legal_ids", "legal_offsets"}):
        rows.setdefault(row.start_group, []).append(row)
    played: dict[int, list[Ply]] = {}
    for ply in _rows(plies, Ply, ()):
        played.setdefault(ply.start_group, []).append(ply)
    return [
        StoredGroup(decisions=tuple(group), plies=tuple(played.get(number, ())))
        for number, group in sorted(rows.items())
        if all(row.policy_version == 0 and row.status == "complete" and row.orders_rejected == 0 for row in group)
    ]


def _rows(table: pa.Table, kind: type[Any], lists: Collection[str]) -> list[Any]:
    """Rows as dataclasses; values of the columns `lists` are numpy arrays, others Python values."""
    names = [field.name for field in fields(kind)]
    columns = []
    for name in names:
        column = as_array(table[name])
        if name in lists:
            offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
            columns.append([values[start:end].copy() for start, end in pairwise(offsets)])
        else:
            columns.append(column.to_pylist())
    return [kind(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]
