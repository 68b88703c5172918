"""Shards: the decisions of whole start groups in one immutable file, and the phases of the same forks in another.

`shards/<producer>/000012.arrow` is published last, so it is complete when it exists. Its name is that of its start groups, so
a second attempt publishes nothing. Its metadata names the phases file, whose name has a CRC32 of the content: decisions of one
attempt never meet phases of another. Rows are stored in batch reading order.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from entente.records.rows import Decision, PlayedPhase
from entente.telemetry.errors import DataError, InputError
from storage.arrow_files import (
    DECISION_SCHEMA,
    PHASE_SCHEMA,
    check_tokens,
    content_crc,
    map_arrow,
    metadata_of,
    read_metadata,
    to_table,
    write_arrow,
)
from storage.files import folders_in, names_in, set_aside
from storage.runs import RunPaths, check_name

LOCAL_PRODUCER = "local"
"""Producer name of the training flow's own rollouts."""
SHARD_NAME = re.compile(r"(\d{6,})\.arrow")
NO_ROWS = -1
"""Policy version of a shard without rows."""
_FAILED = "failed_without_rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    path: Path
    phases_path: Path
    producer: str
    next_start_group: int
    start_groups: tuple[int, ...]
    """Start groups that have rows in it, ascending."""
    newest_version: int
    """Largest policy version of its rows; NO_ROWS without rows."""
    decisions: int
    orders_rejected: int
    failed_without_rows: tuple[str, ...] = ()
    """Reasons of the forks that failed before their first row."""


def shard_names(paths: RunPaths, listed: dict[str, set[str]] | None = None) -> list[str]:
    """Producer by producer, in the order of their start groups, whose numbers may have more than six digits. `listed`: names of
    files by producer that earlier calls have listed; these are left out, and new ones are added."""
    listed, found = {} if listed is None else listed, list[str]()
    for producer in folders_in(paths.shards):
        new = set(names_in(paths.shards / producer)) - listed.setdefault(producer, set())
        listed[producer] |= new
        shards = sorted(filter(SHARD_NAME.fullmatch, new), key=lambda name: (len(name), name))
        found += [f"{producer}/{name}" for name in shards]
    return found


def readable_shards(paths: RunPaths) -> Iterator[tuple[str, Shard]]:
    """Names and descriptions of all shards with readable metadata."""
    for name in shard_names(paths):
        with suppress(DataError):
            yield name, describe_shard(paths.shards / name)


def shard_path(paths: RunPaths, producer: str, first_start_group: int) -> Path:
    return paths.shards / check_name(producer, "The producer") / f"{first_start_group:06d}.arrow"


def publish_shard(
    paths: RunPaths,
    producer: str,
    first_start_group: int,
    decisions: Sequence[Decision] | pa.Table,
    phases: Sequence[PlayedPhase] | pa.Table,
    provenance: Mapping[str, str],
    *,
    next_start_group: int | None = None,
    failed_without_rows: Sequence[str] = (),
) -> Shard:
    """Publish all rows of some start groups, phases first; returns an existing shard instead.

    A table of `decisions` is in batch reading order. `next_start_group` is needed only if the last start groups have no rows.
    Raises InputError for rows of start groups outside `first_start_group .. next_start_group`, and DataError for inconsistent
    token columns.
    """
    final = shard_path(paths, producer, first_start_group)
    if final.exists():
        return describe_shard(final, open_shard(final))
    table: pa.Table = decisions if isinstance(decisions, pa.Table) else to_table(sorted(decisions, key=_reading_order))
    phases_table: pa.Table = phases if isinstance(phases, pa.Table) else to_table(phases, PlayedPhase)
    groups = sorted({*table["start_group"].unique().to_pylist(), *phases_table["start_group"].unique().to_pylist()})
    after = next_start_group if next_start_group is not None else max([first_start_group, *groups]) + 1
    if groups and not first_start_group <= groups[0] <= groups[-1] < after:
        raise InputError(
            f"Shard {final.name} of {producer} may hold start groups {first_start_group} to {after - 1}, "
            f"but has rows of {groups[0]} to {groups[-1]}; name the shard after its first one."
        )
    check_tokens(table)
    versions = table["policy_version"].to_numpy() if table.num_rows else np.array([NO_ROWS])
    phases_crc = content_crc(phases_table)
    phases_path = final.with_name(_phases_name(final, phases_crc))
    metadata = {
        **provenance,
        "shard": f"{producer}/{final.name}",
        "start_groups": json.dumps(groups),
        "next_start_group": str(after),
        "phases": phases_path.name,
        "oldest_version": str(versions.min()),
        "newest_version": str(versions.max()),
        "decisions": str(table.num_rows),
        "orders_rejected": str(table["orders_rejected"].to_numpy().sum()),
        **({_FAILED: json.dumps(failed_without_rows)} if failed_without_rows else {}),
    }
    write_arrow(phases_table, phases_path, {**provenance, "start_groups": metadata["start_groups"]}, phases_crc)
    if write_arrow(table, final, metadata):
        return describe_shard(final, table.replace_schema_metadata(metadata))
    winner = describe_shard(final, open_shard(final))
    if winner.phases_path != phases_path:
        phases_path.unlink(missing_ok=True)  # no shard names it
    return winner


def _reading_order(row: Decision) -> tuple[int, str, str, int, int]:
    """Keeps the rows of an advantage group together, as in a batch, so that gathering copies a few long pieces."""
    return row.start_group, row.power, row.phase, row.fork, row.phase_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    published: tuple[Shard, ...]
    """Shards that start within the range."""
    missing: tuple[tuple[int, int], ...]
    """(first start group, count) of each range without a shard."""
    set_aside: tuple[str, ...]
    """One sentence per damaged shard that was set aside so that its start groups can be played again."""


def coverage(paths: RunPaths, producer: str, first: int, count: int, named: Collection[str] = ()) -> Coverage:
    """Which start groups `first .. first + count - 1` are published, by the names of their shards; sets damaged ones aside, with
    their phases, whose name the same rows would have again. `named`: shards with rows of earlier steps, which stay if only their
    phases are damaged. Never call it for groups of a recorded step: replayed rows have the same decision ids, but not the same
    bytes."""
    published, missing, damaged = [], [], []
    at, gap, end = first, first, first + count
    places = {number: shard_path(paths, producer, number) for number in range(first, end)}
    while at < end:
        path = places[at]
        shard = None
        if path.exists():
            try:
                decisions = open_shard(path)
                if f"{producer}/{path.name}" not in named:
                    open_phases(path, decisions)  # no step selects rows without phases
                shard = describe_shard(path, decisions)
            except DataError as error:
                for file in (*path.parent.glob(f"{path.stem}.*.phases.arrow"), path):
                    set_aside(file)
                damaged.append(str(error))
        if shard is None:
            at += 1
            continue
        if gap < at:
            missing.append((gap, at - gap))
        published.append(shard)
        at = gap = max(shard.next_start_group, at + 1)
    if gap < end:
        missing.append((gap, end - gap))
    return Coverage(published=tuple(published), missing=tuple(missing), set_aside=tuple(damaged))


def first_unpublished(paths: RunPaths, producer: str, first: int, before: int) -> int:
    """The first start group from `first` to `before - 1` without a shard; `before` if all have one. Raises DataError for a shard
    whose metadata are damaged."""
    numbers = sorted(int(Path(name).stem) for name in shard_names(paths) if name.startswith(f"{producer}/"))
    begin = max((number for number in numbers if number <= first), default=first)
    for number in (number for number in numbers if begin <= number < before):
        if number > first:
            break
        first = max(first, describe_shard(shard_path(paths, producer, number)).next_start_group)
    return min(first, before)


def open_shard(path: Path) -> pa.Table:
    return map_arrow(path, DECISION_SCHEMA).table


def open_phases(path: Path, decisions: pa.Table | None = None) -> pa.Table:
    """Map the phases of the shard at `path`. Raises DataError if decisions (if already open: `decisions`) or phases are
    damaged, or do not belong together."""
    shard = describe_shard(path, open_shard(path) if decisions is None else decisions)
    phases = map_arrow(shard.phases_path, PHASE_SCHEMA).table
    if shard.phases_path.name != _phases_name(path, int(metadata_of(phases)["content_crc32"])):
        raise DataError(f"{shard.phases_path} does not have the phases of its name; remove the file, or restore it from a copy.")
    return phases


def _phases_name(shard: Path, crc: int) -> str:
    return f"{shard.stem}.{crc:08x}.phases.arrow"


def describe_shard(path: Path, decisions: pa.Table | None = None) -> Shard:
    """Description from a shard's metadata; DataError if these are damaged. Without `decisions` no row is read, so rows may be
    damaged."""
    metadata = read_metadata(path) if decisions is None else metadata_of(decisions)
    numbers = ("next_start_group", "newest_version", "decisions", "orders_rejected")
    if missing := [name for name in ("start_groups", "phases", *numbers) if name not in metadata]:
        raise DataError(f"{path} has no {' and no '.join(missing)} in its metadata: use the release that wrote the run.")
    return Shard(
        path=path,
        phases_path=path.with_name(metadata["phases"]),
        producer=path.parent.name,
        start_groups=tuple(json.loads(metadata["start_groups"])),
        failed_without_rows=tuple(json.loads(metadata.get(_FAILED, "[]"))),
        **{name: int(metadata[name]) for name in numbers},
    )
