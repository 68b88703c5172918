"""Players that are adapter folders: exported by `entente export`, or any LoRA adapter in peft's layout.

The adapter's config names its base model: a subfolder, a local folder or a hub id. Its `recipe.json` holds the prompt settings,
and optionally the identity of the base and the hashes of the files.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from entente.decoding.base_identity import base_identity, file_hash
from entente.decoding.model_files import RECIPE, recipe_prompts, resolve_model
from entente.game.prompts import PromptSettings
from entente.records.policy_version import ADAPTER_CONFIG, ADAPTER_FILES, PolicyVersion, version_in
from entente.telemetry.errors import DataError, InputError, first_problem
from entente.telemetry.progress import reporter
from storage.json_files import read_object
from storage.runs import hashes_file


class _Base(BaseModel):
    identity: str = ""


class _Training(BaseModel):
    version: int = 1
    """Used if the recipe names none; engines number the versions that they serve themselves."""


class _Recipe(BaseModel):
    files: dict[str, str] = {}
    base: _Base = _Base()
    training: _Training = _Training()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    policy: PolicyVersion
    base: Path
    identity: str


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def open_adapter(folder: Path, runs_root: Path) -> AdapterFolder:
    """The adapter in `folder` and its base, which is downloaded if it is a hub id. `runs_root` has the cache of base hashes.

    Raises:
        InputError: the base is missing, is not the one that the adapter was trained on, or no recipe has prompt settings.
        DataError: a file is damaged.
    """
    recipe = _read_recipe(folder)
    _check_files(folder, recipe.files)
    base = _base_of(folder)
    identity, wanted = base_identity(base, hashes_file(runs_root)), recipe.base.identity
    if wanted not in ("", identity):
        raise InputError(
            f"adapter '{folder}' was trained on another base model than '{base}' (expected base {wanted}, found {identity}): "
            "use its own base, or download it again"
        )
    if adapter_prompts(folder, base) is None:
        raise InputError(
            f"adapter '{folder}' has no {RECIPE} with prompt settings: write one in its folder, as "
            'docs/extending.md shows ("An adapter from outside")'
        )
    policy = version_in(folder.resolve(), recipe.training.version)
    return AdapterFolder(policy=policy, base=base, identity=identity)


def adapter_prompts(folder: Path, base: Path) -> PromptSettings | None:
    return recipe_prompts(folder) or recipe_prompts(base)


def check_weights(policy: PolicyVersion, base: Path) -> None:
    """Check with torch that the torch engine can serve the adapter; logs if it changes nothing. Raises DataError if not."""
    from entente.inference.adapter_check import check_adapter
    from entente.inference.torch_engine import MAX_RANK

    if check_adapter(policy, base, MAX_RANK).is_zero:
        reporter().say(f"adapter '{policy.folder}' changes nothing (half of each pair is zero), so it plays as its base")


def _base_of(folder: Path) -> Path:
    config = read_object(folder / ADAPTER_CONFIG)
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(named, str) or not named:
        raise InputError(f"'{folder / ADAPTER_CONFIG}' names no base model: write its hub id or folder there")
    inside = folder / named
    if revision not in (None, "main") and not inside.is_dir() and not Path(named).is_dir():
        raise InputError(
            f"adapter '{folder}' was trained on the revision {revision!r} of '{named}', and only its newest is fetched: download "
            f"that revision into a folder, and name the folder in {ADAPTER_CONFIG}"
        )
    try:
        return resolve_model(inside if inside.is_dir() else named)
    except InputError as error:
        raise InputError(f"adapter '{folder}' needs its base model '{named}', which is not here: {error}") from error


def _read_recipe(folder: Path) -> _Recipe:
    try:
        return _Recipe.model_validate(read_object(folder / RECIPE)) if (folder / RECIPE).is_file() else _Recipe()
    except ValidationError as error:
        problem = first_problem(error)
        raise DataError(f"'{folder / RECIPE}' is not an adapter's recipe: {problem}; correct it, or export again") from error


def _check_files(folder: Path, hashes: dict[str, str]) -> None:
    for name in (*ADAPTER_FILES, *hashes):
        file = folder / name
        if not file.is_file():
            raise DataError(f"adapter '{folder}' lacks the file '{name}': download it again")
        if name in hashes and file_hash(file) != hashes[name]:
            raise DataError(f"'{file}' is not the file that was exported, by the hash in {RECIPE}: download it again")
