"""Gathers the files that a recorded step is repeated from: its ledger, the rows and lessons that the ledger names.

They are put into the folder of another run. Rows and lessons are linked, because a published file never changes. The run that
they come from is not changed and may be in progress.
"""

import shutil

from storage.files import names_in
from storage.ledger import ledger_path, read_ledger
from storage.lessons import recorded_lessons
from storage.runs import RunPaths
from telemetry.errors import InputError


def copy_step(paths: RunPaths, to: RunPaths, step: int) -> None:
    """Copy the ledger of `step`, and link the shards and lessons that it names.

    Raises:
        InputError: one of these files is gone.
        DataError: the ledger is damaged.
    """
    rows = read_ledger(paths, step)
    if rows is None:
        raise InputError(f"the ledger of step {step} is gone from '{paths.ledger}': restore it from a copy")
    copy = ledger_path(to, step)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ledger_path(paths, step), copy)
    for name in dict.fromkeys(rows["shard"].to_pylist()):
        shard, link = paths.shards / name, to.shards / name
        if not shard.exists():
            raise InputError(f"shard '{shard}', which step {step} trained on, is gone: restore it from a copy")
        link.parent.mkdir(parents=True, exist_ok=True)
        for file in (shard.parent / name for name in names_in(shard.parent) if name.startswith(f"{shard.stem}.")):
            if not (link.parent / file.name).is_symlink():
                (link.parent / file.name).symlink_to(file.resolve())
    for name in dict.fromkeys(lesson.shard for lesson in recorded_lessons(rows)):
        file, link = paths.lessons / name, to.lessons / name
        if not file.exists():
            raise InputError(f"the lessons '{file}', which step {step} trained on, are gone: restore them from a copy")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(file.resolve())
