"""The folder in which a base model is made, and its settings. Does not import torch."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from entente.telemetry.errors import InputError
from entente.telemetry.read_file import read_text
from entente.training.imitation.settings import ImitationSettings
from storage.files import durable_write, make_directory
from storage.runs import check_name

_SETTINGS, _GAMES = "settings.json", "games"
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFolder:
    root: Path
    final: Path


def work_folder(models: Path, name: str) -> WorkFolder:
    """Raises InputError if the name is not allowed."""
    check_name(name, "The model")
    return WorkFolder(root=models / f".{name}.imitation", final=models / name)


def begin(work: WorkFolder, settings: ImitationSettings, games: Path) -> None:
    """Write the settings, and the name of the games' folder; raises InputError as `check_new`."""
    check_new(work)
    shutil.rmtree(work.root, ignore_errors=True)  # a removal that was killed may leave files; without settings they do not count
    make_directory(work.root)
    durable_write(work.root / _GAMES, games.name.encode())
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
    """The games that the model started with: recorded files may have changed since."""
    folder = teachers / read_text(work.root / _GAMES, at_most=_LARGEST, what="file")
    if not folder.is_dir():
        raise InputError(f"the games of model '{work.final.name}' are missing from '{folder}': restore them, or start again")
    return folder


def finish(work: WorkFolder) -> None:
    shutil.rmtree(work.root)
