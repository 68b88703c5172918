"""The folder in which a base model is made, with its settings and the files that it learns from. Does not import torch.

A resumed model learns from the files that were there when it began: labels may have been added since, or another release may
play other games."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from entente.telemetry.errors import InputError
from entente.telemetry.read_file import read_json_object, read_text
from entente.training.imitation.settings import ImitationSettings
from storage.files import durable_write, make_directory, names_in, remove_folder
from storage.runs import check_name

_SETTINGS, _FILES = "settings.json", "files.json"
_LARGEST, _LARGEST_FILES = 1 << 20, 64 << 20
"""Bytes of the two: a file of games or labels takes 25, and 100,000 games of labels are 25,000 files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFolder:
    root: Path
    final: Path


def work_folder(models: Path, name: str) -> WorkFolder:
    """Raises InputError if the name is not allowed."""
    check_name(name, "The model")
    return WorkFolder(root=models / f".{name}.imitation", final=models / name)


def begin(work: WorkFolder, settings: ImitationSettings, games: Path) -> None:
    """Write the settings, and which games and labels there are; raises InputError as `check_new`."""
    check_new(work)
    shutil.rmtree(work.root, ignore_errors=True)  # a removal that was killed may leave files; without settings they do not count
    make_directory(work.root)
    files = {"games": {games.name: _sizes(games)}, "labels": {str(folder): _sizes(folder) for folder in settings.labels}}
    durable_write(work.root / _FILES, json.dumps(files).encode())
    durable_write(work.root / _SETTINGS, settings.model_dump_json(indent=1).encode())


def check_new(work: WorkFolder) -> None:
    """Raises InputError if a finished or unfinished model has this name."""
    if work.final.exists():
        raise InputError(f"there is a model in '{work.final}': choose another name, or remove it")
    if is_begun(work):
        raise InputError(f"model '{work.final.name}' was started: continue it with --resume, or remove '{work.root}'")


def is_begun(work: WorkFolder) -> bool:
    return (work.root / _SETTINGS).is_file()


def begun_settings(work: WorkFolder) -> ImitationSettings:
    """Raises InputError if there is no unfinished model, or another release began it."""
    file = work.root / _SETTINGS
    if not file.is_file():
        done = f", and '{work.final}' is finished" if work.final.exists() else ""
        raise InputError(
            f"no model '{work.final.name}' was started in '{work.root.parent}'{done}: leave out --resume to start it"
        )
    try:
        return ImitationSettings.model_validate_json(read_text(file, at_most=_LARGEST, what="settings file"))
    except ValidationError as error:
        raise InputError(f"settings file '{file}' is not of this release: {error.errors()[0]['msg']}; start again") from error


def begun_games(work: WorkFolder, teachers: Path) -> Path:
    """The folder of the games that the model began with. Raises InputError if one is missing or changed."""
    ((name, sizes),) = _files(work)["games"].items()
    _check_files(work, teachers / name, sizes)
    return teachers / name


def begun_labels(work: WorkFolder) -> list[Path]:
    """The files of labels that the model began with. Raises InputError if one is missing or changed."""
    found = []
    for folder, sizes in _files(work)["labels"].items():
        _check_files(work, Path(folder), sizes)
        found += [Path(folder, name) for name in sizes]
    return found


def _files(work: WorkFolder) -> dict[str, dict[str, dict[str, int]]]:
    """By kind and folder, the size of each file in bytes."""
    if not (work.root / _FILES).is_file():
        raise InputError(f"model '{work.final.name}' was begun by another release: go on with that, or remove '{work.root}'")
    return dict(read_json_object(work.root / _FILES, at_most=_LARGEST_FILES, what="file"))


def _sizes(folder: Path) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for name in sorted(names_in(folder)) if name.endswith(".arrow")}


def _check_files(work: WorkFolder, folder: Path, sizes: Mapping[str, int]) -> None:
    there = _sizes(folder)
    if changed := next((name for name, size in sizes.items() if there.get(name) != size), None):
        raise InputError(
            f"model '{work.final.name}' began with '{folder / changed}', which is missing or changed: restore it, or start again"
        )


def finish(work: WorkFolder) -> None:
    remove_folder(work.root)
