"""Labels in files: `<folder>/000064.arrow` holds those of some consecutive games, named after the first; published once.

The metadata of each file say how its labels were made: search, policy, opponents and code. All files of a folder are made
alike, and folders that are read together have one search; everything else is refused with a sentence. Files of several machines
are joined by copying them into folders of one name. This module plays and searches nothing.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from entente.records.label import Label
from entente.telemetry.errors import DataError, InputError
from entente.telemetry.setting_marks import leaves
from storage.arrow_files import LABEL_SCHEMA, map_arrow, metadata_of, to_table, write_arrow
from storage.files import file_lock, names_in

LABEL_FOLDER = "_labels"
"""Folder of all labels, beside the runs."""
_MADE_BY = "made_by"
_LOCK_S = 60.0
_CURE = "remove the file; `entente label` makes it again."
SEARCH = "search"
"""The entry of `made_by` that must be equal in all folders that are read together."""
_MAY_SHARE = {"years": None, "search_share": None, "opponents": None, "code": None}
"""Games of one number that differ in these alone may be the same: the longer begins as the shorter, search and opponents are
drawn, and most changes of the code change no game."""


def label_path(folder: Path, first_game: int) -> Path:
    return folder / f"{first_game:06d}.arrow"


def publish_labels(folder: Path, first_game: int, labels: Sequence[Label], made_by: Mapping[str, Any]) -> bool:
    """False, without a change, if that file exists."""
    path = label_path(folder, first_game)
    about = {_MADE_BY: json.dumps(made_by, sort_keys=True), "shard": f"{folder.name}/{path.name}"}
    return write_arrow(to_table(labels, Label), path, about)


def publish_alike(folder: Path, first_game: int, labels: Sequence[Label], made_by: Mapping[str, Any]) -> None:
    """Like `publish_labels`; raises InputError if another command has published other labels in the folder meanwhile."""
    with file_lock(folder / ".lock", wait_s=_LOCK_S) as mine:
        if not mine:
            raise DataError(f"'{folder}/.lock' was held for {_LOCK_S:.0f} s: stop the `entente label` that holds it, and go on.")
        check_made_alike(folder, made_by, 1)
        publish_labels(folder, first_game, labels, made_by)
        (folder / ".lock").unlink()


def check_made_alike(folder: Path, made_by: Mapping[str, Any], most: int | None = None) -> None:
    """Raise InputError if the folder has labels that were not made by `made_by`; DataError if a file is damaged. `most`: files to
    look at; None: all."""
    there = sorted(folder.glob("[!.]*.arrow"))[:most]
    tables = read_labels([folder], there) if there else []
    if tables and (difference := _difference(_made_by(tables[0]), made_by)):
        cure = "go on with the release that made them" if difference.startswith("code.") else "keep that"
        raise InputError(f"the labels in '{folder}' were made with {difference}: {cure}, or name another folder")


def read_labels(folders: Sequence[Path], files: Collection[Path] | None = None) -> list[pa.Table]:
    """One verified, memory-mapped table per file, in the order of folders and games; of `files` alone, unless None.

    Raises:
        InputError: no labels in a folder, or labels that may not be mixed.
        DataError: a file is damaged, of another schema version, or a copy under another name.
    """
    tables, earlier = list[pa.Table](), list[tuple[Path, list[str], dict[str, Any]]]()
    for folder in folders:
        there = sorted(name for name in names_in(folder) if name.endswith(".arrow"))
        if not (names := [name for name in there if files is None or folder / name in files]):
            raise InputError(f"there are no labels in '{folder}': make some with `entente label`")
        mine = [map_arrow(folder / name, LABEL_SCHEMA, _CURE).table for name in names]
        made_by = _made_by(mine[0])
        for name, table in zip(names, mine, strict=True):
            if difference := _difference(_made_by(table), made_by):
                cure = f"move it to another folder named '{folder.name}'"
                raise InputError(f"'{folder / name}' was made with {difference} as in '{names[0]}': {cure}")
        for other, others, about in earlier:
            if about | _MAY_SHARE == made_by | _MAY_SHARE and {*others} & {*names}:
                raise InputError(f"'{folder}' and '{other}' hold labels of the same games: name one of them")
            if about[SEARCH] != made_by[SEARCH]:
                difference = _difference({SEARCH: made_by[SEARCH]}, {SEARCH: about[SEARCH]})
                raise InputError(f"the labels in '{folder}' were made with {difference} as in '{other}': learn from one of them")
        earlier.append((folder, names, made_by))
        tables += mine
    return tables


def _made_by(table: pa.Table) -> dict[str, Any]:
    metadata = metadata_of(table)
    if _MADE_BY not in metadata:
        raise DataError(f"{metadata.get('shard', 'A file')} does not say how its labels were made: remove it.")
    return dict(json.loads(metadata[_MADE_BY]))


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first difference in words; empty if there is none."""
    flat_there, flat_here = leaves(there), leaves(here)
    for name in {**flat_here, **flat_there}:
        if flat_there.get(name) != flat_here.get(name):
            return f"{name} {flat_there.get(name)!r}, not {flat_here.get(name)!r}"
    return ""
