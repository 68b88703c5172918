"""Folders that leave this machine: they get their name by one rename, name no folder of this machine, and never change."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decoding.model_files import read_config
from storage.json_files import read_object
from storage.runs import publish_directory
from telemetry.errors import InputError

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_PATH_KEYS = ("_name_or_path", "name_or_path")
"""Keys of a saved config that may hold a folder."""


@contextmanager
def new_folder(to: Path, runs_root: Path) -> Iterator[Path]:
    """A folder to write into. At the end of the block it is checked and renamed to `to`; after an error it is removed.

    Raises:
        InputError: `to` exists, or a file names a folder of this machine.
    """
    if to.exists():
        raise InputError(f"'{to}' exists, and a published model never changes: choose another folder, or remove it")
    aside = to.with_name(f".{to.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        _check_paths(aside, (Path.cwd(), Path.home(), runs_root, to.parent))
        publish_directory(aside, to)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def copy_tokenizer(base: Path, folder: Path) -> None:
    """Copy the files of the base's tokenizer, without folders of this machine."""
    for name in _TOKENIZER:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    if (folder / "tokenizer_config.json").is_file():
        _write_json(folder / "tokenizer_config.json", read_object(folder / "tokenizer_config.json"))


def write_config(base: Path, folder: Path, dtype: str) -> None:
    """Write the configs of the base for weights of the number format `dtype`."""
    copy_generation_config(base, folder)
    _write_json(folder / "config.json", read_config(base) | {"dtype": dtype})


def copy_generation_config(base: Path, folder: Path) -> None:
    """Copy the base's generation_config.json, if it has one."""
    if (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", folder / "generation_config.json")


def without_paths(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config without the keys that may hold a folder."""
    return {key: value for key, value in content.items() if key not in _PATH_KEYS}


def folder_size(folder: Path) -> int:
    """Bytes of all files in the folder and its subfolders."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(without_paths(content), indent=2) + "\n")


def _check_paths(folder: Path, places: tuple[Path, ...]) -> None:
    """Check that no file in `folder` names one of these folders of this machine.

    Raises:
        InputError: a file does.
    """
    local = {str(path.resolve()).encode() for path in places} - {b"/"}
    for file in filter(Path.is_file, folder.rglob("*")):
        content = file.read_bytes()
        if named := [path.decode() for path in local if path in content]:
            raise InputError(f"'{file.name}' would name this machine's folder '{named[0]}': remove it from the model's files")
