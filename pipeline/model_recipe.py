"""The recipe of a published model: its settings, and the commands that make it again.

Settings are those of the base model's recipe and, of a version, those of its run that change rows or weights. Folders of this
machine are left out.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from decoding.model_files import RECIPE, file_hash
from evaluation.contestants import Contestant
from game.prompt_settings import DEFAULT_PROMPTS
from pipeline.improve_rounds import ImproveSettings, rounds_until
from pipeline.plans.find_model import TINY
from pipeline.run_settings import MODEL_FOLDER, RunSettings, changed_settings, layered_settings
from storage.json_files import read_object
from storage.runs import RunPaths
from training.imitation.settings import ImitationSettings
from training.settings import TinyModelSettings

COMMANDS, FILES = "commands", "files"
"""Keys of the commands that make the model, in their order, and of the SHA-256 of each of its files."""
_PRESET = "laptop"
_LEFT_OUT = ("inference.model", "inference.compile_cache")


def published_recipe(base: Path, version: Contestant | None, settings: RunSettings | None) -> dict[str, Any]:
    """The recipe of the model in `base`, or of a version trained on it by a run with `settings`.

    Returns:
        The base's own recipe, with the keys `commands` and, for a version, `training`.
    """
    recipe = read_object(base / RECIPE)
    own = recipe["settings"]
    if own.get("recorded"):
        recipe["settings"] = own = own | {"recorded": [Path(file).name for file in own["recorded"]]}
    commands = recipe.get(COMMANDS) or [_base_command(base.name, own, recipe.get("prompts", {}))]
    if version is None or settings is None:
        return recipe | {COMMANDS: commands}
    recipe["prompts"] = settings.prompts.model_dump()  # what it played with; older bases do not say it
    if not version.version:
        return recipe | {COMMANDS: commands}
    if settings.inference.model == TINY:
        commands = []  # the run makes its base itself
    training, trained = trained_by(version, settings, f"runs/{MODEL_FOLDER}/{base.name}")
    return recipe | {COMMANDS: [*commands, *trained], "training": training}


def trained_by(version: Contestant, settings: RunSettings, base: str) -> tuple[dict[str, Any], list[str]]:
    """How a run with `settings` trained the version: the settings that are not the preset's, and the commands.

    Args:
        base: the base model as the first command names it, if the run does not make it itself.
    """
    changed = {name: after for name, (_, after) in changed_settings(layered_settings(_PRESET), settings).items()}
    changed = {name: value for name, value in changed.items() if name not in _LEFT_OUT}
    flags = [] if settings.inference.model == TINY else ["--inference.model", base]
    flags += [word for name, value in changed.items() for word in _flag(name, value)]
    commands: list[list[str]] = []
    reached, run = 0, ["--run", version.run]
    improved = rounds_until(RunPaths(version.adapter.parents[1]), version.version) if version.adapter else []
    for before, after, improve in [*improved, (version.version, version.version, None)]:
        if before > reached or not commands:
            more = ["--resume"] if commands else flags
            commands.append(["train", *run, "--steps", str(before), *more])
        if improve is not None:
            if commands[-1][0] == "improve":
                commands.pop()  # the rounds before it are among those of this one
            usual = _dotted(ImproveSettings())
            given = ((name, value) for name, value in _dotted(improve).items() if value != usual[name])
            commands.append(["improve", *run, *(word for name, value in given for word in _flag(name, value))])
        reached = after
    told = {"run": version.run, "version": version.version, "preset": _PRESET, "settings": changed}
    return told, [shlex.join(["entente", *words]) for words in commands]


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of the model, by its path in the folder; recipe and card are not among them."""
    own = (folder / RECIPE, folder / "README.md")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file not in own)
    return {file.relative_to(folder).as_posix(): file_hash(file) for file in files}


def _base_command(name: str, settings: Mapping[str, Any], prompts: Mapping[str, Any]) -> str:
    """The command that makes a base model by its recipe."""
    imitates = "teachers" in settings
    words = ["entente", "model", "imitate", name] if imitates else ["entente", "model", "make"]
    defaults = _plain(ImitationSettings() if imitates else TinyModelSettings()) | {
        f"prompts.{key}": value for key, value in _plain(DEFAULT_PROMPTS).items()
    }
    made = {**settings, **{f"prompts.{key}": value for key, value in prompts.items()}}
    words += [word for key, value in made.items() if value != defaults.get(key) for word in _flag(key, value)]
    return shlex.join(words)


def _dotted(improve: ImproveSettings) -> dict[str, Any]:
    """The settings as on the command line of `entente improve`, those of its search as `search.NAME`."""
    plain = _plain(improve)
    return plain | {f"search.{name}": value for name, value in plain.pop("search").items()}


def _plain(settings: BaseModel) -> dict[str, Any]:
    return settings.model_dump(mode="json")


def _flag(name: str, value: Any) -> Iterator[str]:
    """The words that give a setting on the command line."""
    *rooms, last = name.replace("_", "-").split(".")
    if isinstance(value, bool):
        yield "--" + ".".join([*rooms, last if value else f"no-{last}"])
        return
    for each in value if isinstance(value, list) else [value]:
        yield "--" + ".".join([*rooms, last])
        yield str(each)
