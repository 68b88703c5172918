"""`entente runs clean`: list old files of runs, then remove them."""

import shlex
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.table import Table

from entente.cli.options import RunsRoot
from entente.cli.terminal import cell, output_console
from entente.inference.memory_plan import size_text
from entente.telemetry.errors import DataError, EntenteError, InputError
from storage.files import entries_in, file_lock
from storage.retention import Removable, RetentionSettings, removable_asides, removable_in_run, remove
from storage.runs import LATEST, RunPaths, check_name, run_names

_Names = Annotated[list[str] | None, Parameter(help="Clean only these runs, and not the shared folders.", negative="")]


def clean(
    *,
    run: _Names = None,
    runs_root: RunsRoot = Path("runs"),
    dry_run: Annotated[bool, Parameter(help="List what would be removed, and remove nothing.", negative="")] = False,
    settings: Annotated[RetentionSettings | None, Parameter(name="*", help="Retention settings.")] = None,
) -> None:
    """Remove old adapters and checkpoints, local W&B folders, and leftovers of killed processes.

    Keeps ledgers, scores, metrics, and every adapter that a resumed run or a score refers to. Without --keep-adapters each run
    keeps as many as its own retention.keep_adapters says. Removes shards only if --shards-gb limits them. A run that a process is
    working on is skipped.

    Examples

        entente runs clean --dry-run                     list what would be removed

        entente runs clean --run mine --keep-adapters 5

        entente runs clean --run mine --shards-gb 20 --dry-run
    """
    chosen = settings or RetentionSettings()
    runs = [_known_run(runs_root, name) for name in run] if run else _all_runs(runs_root)
    removables: list[Removable] = []
    with ExitStack() as stack:
        for paths in runs:
            if _at_rest(stack, paths, dry_run):
                removables += _removable(paths, chosen)
                removables += _old_shards(paths, chosen)
        if not run:
            removables += [each for folder in _shared_folders(runs_root) for each in removable_asides(folder)]
        _show(removables)
        if not dry_run:
            for each in removables:
                remove(each)
    total = size_text(sum(each.size for each in removables))
    print(f"{total} {'would be' if dry_run else 'were'} freed" if removables else "nothing is old enough to go")
    if dry_run:
        print("nothing was removed")


def _removable(paths: RunPaths, settings: RetentionSettings) -> list[Removable]:
    try:
        return removable_in_run(paths, settings)
    except DataError as error:
        print(f"{paths.root}: skipped, because {error}")
        return []


def _old_shards(paths: RunPaths, settings: RetentionSettings) -> list[Removable]:
    if settings.shards_gb == 0:
        return []
    from entente.settings.layers import settings_of
    from storage.retention import RunAge, newest_versions, removable_shards

    try:
        age = RunAge.of(paths, settings_of(paths).storage)
        return removable_shards(paths, newest_versions(paths), age, settings)
    except EntenteError as error:
        print(f"{paths.root}: its shards are skipped, because {error}")
        return []


def _at_rest(stack: ExitStack, paths: RunPaths, dry_run: bool) -> bool:
    """True if no process works on the run. Unless `dry_run`, the run stays locked until `stack` is closed."""
    for lock in (paths.lock, paths.trainer_lock):
        if (lock.exists() or not dry_run) and not stack.enter_context(file_lock(lock)):
            print(f"{paths.root}: left alone, a process is at work on it")
            return False
    return True


def _all_runs(runs_root: Path) -> list[RunPaths]:
    if not runs_root.is_dir():
        raise InputError(f"there is no folder '{runs_root}': name the folder of your runs with --runs-root")
    runs = [paths for name in run_names(runs_root) if (paths := RunPaths(runs_root / name)).settings.exists()]
    for paths in runs:
        if paths.root.is_symlink():
            print(f"{paths.root}: left alone, it is a link")
    return [paths for paths in runs if not paths.root.is_symlink()]


def _known_run(runs_root: Path, name: str) -> RunPaths:
    if name == LATEST:
        raise InputError(f"'{LATEST}' is not enough to remove anything: name the run")  # another run may have started since
    paths = RunPaths(runs_root / check_name(name, "run"))
    if not paths.settings.exists():
        raise InputError(f"there is no run '{name}' in '{runs_root}'")
    if paths.root.is_symlink():
        there = paths.root.resolve()
        why = f"there is no run '{name}' in '{runs_root}' itself, only a link to it"
        raise InputError(f"{why}: clean it by --runs-root {shlex.quote(str(there.parent))} --run {shlex.quote(there.name)}")
    return paths


def _shared_folders(runs_root: Path) -> list[Path]:
    """Those beside the runs, and the folders in them: caches, models, matches, labels, games."""
    shared = [each.path for each in entries_in(runs_root) if each.is_folder and each.path.name.startswith("_")]
    inner = [each.path for folder in shared for each in entries_in(folder) if each.is_folder and each.path.name[0] != "."]
    return [runs_root, *shared, *inner]


def _show(removables: Iterable[Removable]) -> None:
    table = Table("where", "what", "how many", "names", "size", box=None, padding=(0, 2, 0, 0))
    for (folder, why), group in groupby(removables, key=lambda each: (each.path.parent, each.why)):
        some = list(group)
        names = some[0].path.name + (f" … {some[-1].path.name}" if len(some) > 1 else "")
        table.add_row(cell(str(folder)), why, str(len(some)), cell(names), size_text(sum(each.size for each in some)))
    if table.row_count:
        output_console().print(table)
