"""Shards: decisions of whole start groups in one immutable file, with the plies of the same forks in another
beside it.

Promise: ``shards/<producer>/000012.arrow`` appears last and whole, under a name that follows from the work
and not from the attempt. A repeated attempt meets its own name and loses quietly. The decisions' metadata
names its plies file, whose name carries its content's CRC32: so decisions of one attempt are never read with
plies of another, whoever was killed when. Rows lie in the order in which batches read them, whatever order they were given in.
Never: list a folder, choose rows, or look into a ply's JSON.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from records.rows import Decision, Ply
from storage.arrow_files import MappedFile, content_crc, map_arrow, metadata_of, read_arrow, write_arrow
from storage.files import FILES
from storage.runs import RunPaths, check_name, set_aside
from storage.schema import DECISION_SCHEMA, PLY_SCHEMA, as_array, check_tokens, row_checksums, to_table
from telemetry.errors import DataError, InputError

SHARD_NAME = re.compile(r"(\d{6,})\.arrow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A published shard."""

    path: Path
    """The decisions."""
    plies_path: Path
    """The plies of the same forks."""
    producer: str
    """Who made it: the name of its folder."""
    first_start_group: int
    """The number in its name."""
    next_start_group: int
    """The number in the name of the producer's next shard."""
    start_groups: tuple[int, ...]
    """Start groups that have rows in it, ascending."""
    already: bool
    """True if an earlier attempt had published it, whose rows stand."""


def shard_path(paths: RunPaths, producer: str, first_start_group: int) -> Path:
    """Where the producer's shard that begins with this start group lies or will lie."""
    return paths.shards / check_name(producer, "The producer") / f"{first_start_group:06d}.arrow"


def publish_shard(
    paths: RunPaths,
    producer: str,
    first_start_group: int,
    decisions: Sequence[Decision],
    plies: Sequence[Ply],
    provenance: Mapping[str, str],
    *,
    next_start_group: int | None = None,
) -> Shard:
    """Publish all rows of some start groups, plies first.

    ``next_start_group`` is needed only if the last start groups have no rows.

    Raises:
        InputError: the rows belong to start groups outside ``first_start_group .. next_start_group``.
        DataError: a row's token columns do not fit one another.
    """
    final = shard_path(paths, producer, first_start_group)
    if FILES.exists(final):
        return describe_shard(final, open_shard(final), already=True)
    groups = sorted({row.start_group for row in (*decisions, *plies)})
    after = next_start_group if next_start_group is not None else max([first_start_group, *groups]) + 1
    if groups and not first_start_group <= groups[0] <= groups[-1] < after:
        raise InputError(
            f"Shard {final.name} of {producer} may hold start groups {first_start_group} to {after - 1}, "
            f"but was given rows of {groups[0]} to {groups[-1]}; name the shard after its first one."
        )
    table, plies_table = to_table(sorted(decisions, key=_reading_order)), to_table(plies, Ply)
    check_tokens(table)
    plies_sums = row_checksums(plies_table)
    plies_path = final.with_name(_plies_name(final, content_crc(plies_table, plies_sums)))
    metadata = {
        **provenance,
        "shard": f"{producer}/{final.name}",
        "start_groups": json.dumps(groups),
        "next_start_group": str(after),
        "plies": plies_path.name,
    }
    write_arrow(plies_table, plies_path, {**provenance, "start_groups": metadata["start_groups"]}, plies_sums)
    if write_arrow(table, final, metadata, as_array(table["checksum"]).to_numpy()):
        return describe_shard(final, table.replace_schema_metadata(metadata), already=False)
    winner = describe_shard(final, open_shard(final), already=True)
    if winner.plies_path != plies_path:
        FILES.remove(plies_path)  # named by no shard, as its own decisions lost
    return winner


def _reading_order(row: Decision) -> tuple[int, str, str, int, int]:
    """The rows of an advantage group lie together, as a batch has them, so that gathering copies a few long pieces."""
    return row.start_group, row.power, row.phase, row.fork, row.ply


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Which of some start groups are published already."""

    published: tuple[Shard, ...]
    """Shards that begin among them."""
    missing: tuple[tuple[int, int], ...]
    """(first start group, how many) of each stretch that no shard holds."""
    set_aside: tuple[str, ...]
    """Sentences about damaged shards that were found, and set aside so that their groups can be played again."""


def coverage(paths: RunPaths, producer: str, first: int, count: int) -> Coverage:
    """Look for the start groups ``first .. first + count - 1`` of a producer, by the names that their shards would have.

    A damaged shard among them is set aside. Not to be asked of groups that a ledger names: rows that are played again are the
    same decisions, but not the same bytes.
    """
    published, missing, damaged = [], [], []
    at, gap, end = first, first, first + count
    while at < end:
        path = shard_path(paths, producer, at)
        shard = None
        if FILES.exists(path):
            try:
                shard = describe_shard(path, open_shard(path), already=True)
            except DataError as error:
                set_aside(path)
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


def open_shard(path: Path) -> pa.Table:
    """Map a shard's decisions and verify every byte of them; DataError names the file and its fault."""
    return map_shard(path).table


def map_shard(path: Path) -> MappedFile:
    """As ``open_shard``, with what is needed to see later whether the file is still as it was verified."""
    file = map_arrow(path, DECISION_SCHEMA)
    named = f"{path.parent.name}/{path.name}"
    # A shard of a version that did not write its name is taken at the one that it bears.
    if (written := metadata_of(file.table).get("shard", named)) != named:
        raise DataError(f"{path} was written as shard {written}: it is a copy or was renamed; remove it, or name it so.")
    wrong = np.flatnonzero(file.sums != as_array(file.table["checksum"]).to_numpy())
    if len(wrong):
        raise DataError(f"{path} is damaged: row {wrong[0]} does not have its checksum; remove the file or restore it.")
    return file


def open_plies(path: Path, decisions: pa.Table | None = None) -> pa.Table:
    """Map the plies of the shard at ``path``; its ``decisions``, if opened already, save a second look."""
    shard = describe_shard(path, open_shard(path) if decisions is None else decisions, already=True)
    plies = read_arrow(shard.plies_path, PLY_SCHEMA)
    if shard.plies_path.name != _plies_name(path, int(metadata_of(plies)["content_crc32"])):
        raise DataError(f"{shard.plies_path} holds other plies than its name says; remove the file, or restore it from a copy.")
    return plies


def _plies_name(shard: Path, crc: int) -> str:
    return f"{shard.stem}.{crc:08x}.plies.arrow"


def describe_shard(path: Path, decisions: pa.Table, *, already: bool) -> Shard:
    """What the metadata of an opened shard says about it."""
    metadata = metadata_of(decisions)
    return Shard(
        path=path,
        plies_path=path.with_name(metadata["plies"]),
        producer=path.parent.name,
        first_start_group=int(path.stem),
        next_start_group=int(metadata["next_start_group"]),
        start_groups=tuple(json.loads(metadata["start_groups"])),
        already=already,
    )
