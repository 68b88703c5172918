"""Writes a policy version as a folder that transformers with peft, and vLLM, load as it is.

The folder holds the adapter, or with `merged` whole weights; tokenizer, recipe, card, and a program that orders under the legal
mask. A base model from the hub is named by its id. A base that was made on this machine lies in the subfolder `base`. No file
names a folder of this machine.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inference
from decoding.model_files import RECIPE, base_identity, may_be_hub_id, read_config, weight_files
from evaluation.adapter_folders import check_weights
from evaluation.contestants import Contestant, resolve_contestant
from inference.publish_weights import publish_weights
from pipeline.model_recipe import COMMANDS, FILES, file_hashes, published_recipe, trained_by
from pipeline.plans.find_model import model_of
from pipeline.published_folder import (
    copy_generation_config,
    copy_tokenizer,
    new_folder,
    without_paths,
    write_config,
)
from pipeline.run_settings import RunSettings, settings_at
from reports.adapter_card import adapter_card
from reports.model_card import CARD
from storage.adapters import ADAPTER_FILES
from storage.json_files import read_object
from storage.runs import RunPaths, durable_write
from telemetry.errors import InputError

_PROGRAM = Path(inference.__file__).with_name("legal_orders.py")
"""Draws under the mask. It is copied, not imported."""
BASE_FOLDER = "base"
"""Subfolder with a base model that no hub has."""
MOST_BASE_BYTES = 16_000_000
"""Largest base model that is included, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """A version of a run, with its adapter."""

    version: Contestant
    adapter: Path
    """Folder of its adapter."""
    run: RunPaths
    settings: RunSettings
    """The settings with which it was trained."""
    base: Path
    """Folder of its base model on this machine."""

    @property
    def hub_id(self) -> str:
        """The base model's hub id; empty if it was made on this machine."""
        name = self.settings.inference.model
        return name if not Path(name).is_dir() and may_be_hub_id(name) else ""


def find_export(run: str, version: int, runs_root: Path) -> ExportSource:
    """The version of the run; -1 is the newest.

    Raises:
        InputError: there is no such version, it is the base model, or the base is gone from this machine.
        DataError: the adapter is damaged.
    """
    found = resolve_contestant("newest" if version == -1 else f"v{version}", run, runs_root)
    if found.adapter is None:
        raise InputError(
            f"version 0 of run '{run}' is its base model and has no adapter: name a version from 1 on, or publish the base with "
            "`entente model publish`"
        )
    paths = RunPaths(runs_root / run)
    settings = settings_at(paths, found.version)
    return ExportSource(
        version=found, adapter=found.adapter, run=paths, settings=settings, base=model_of(settings, runs_root, run)
    )


def export_adapter(source: ExportSource, to: Path, runs_root: Path, *, merged: bool = False) -> Path:
    """Write the folder `to`.

    Args:
        merged: whole weights, with the adapter added, instead of the adapter beside its base.

    Raises:
        InputError: the folder exists, the base can neither be named nor included, or merging would round away what was learned.
        DataError: adapter, score or match is damaged.
    """
    check_weights(source.version.policy, source.base)
    with new_folder(to, runs_root) as folder:
        copy_tokenizer(source.base, folder)
        if merged:
            dtype = publish_weights(source.base, source.adapter, folder)
            write_config(source.base, folder, dtype)
            base, named = source.base, source.hub_id
        else:
            base, named = _write_adapter(source, folder)
        shutil.copyfile(_PROGRAM, folder / _PROGRAM.name)
        recipe = _recipe(source, named, base_identity(base)) | {FILES: file_hashes(folder)}
        durable_write(folder / RECIPE, json.dumps(recipe, indent=1).encode())
        durable_write(folder / CARD, adapter_card(to.name, recipe, source.run, source.version, merged=merged).encode())
    return to


def _write_adapter(source: ExportSource, folder: Path) -> tuple[Path, str]:
    """Write the adapter and what it needs of the base; returns the base's folder, and its name in the adapter's config."""
    base, named = source.base, source.hub_id
    if not named:
        base, named = folder / BASE_FOLDER, BASE_FOLDER
        _copy_base(source.base, base)
    config, weights = ADAPTER_FILES
    content = read_object(source.adapter / config) | {"base_model_name_or_path": named}
    (folder / config).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(source.adapter / weights, folder / weights)
    return base, named


def _copy_base(base: Path, folder: Path) -> None:
    """Copy a small base model. Its files keep their bytes, and with them the base its identity, unless they name a folder."""
    if (size := sum(file.stat().st_size for file in weight_files(base))) > MOST_BASE_BYTES:
        raise InputError(
            f"the base model '{base.name}' is a folder of this machine with {size / 1e6:.0f} MB of weights, more than the "
            f"{MOST_BASE_BYTES / 1e6:.0f} MB that are included: export with --merged, or train on a hub id"
        )
    folder.mkdir()
    copy_tokenizer(base, folder)
    copy_generation_config(base, folder)
    for file in weight_files(base):
        shutil.copyfile(file, folder / file.name)
    if without_paths(config := read_config(base)) == config:
        shutil.copyfile(base / "config.json", folder / "config.json")
    else:
        (folder / "config.json").write_text(json.dumps(without_paths(config), indent=2) + "\n")
    if (base / RECIPE).is_file():
        recipe = published_recipe(base, None, None) | {FILES: file_hashes(folder)}
        (folder / RECIPE).write_text(json.dumps(recipe, indent=1))


def _recipe(source: ExportSource, named: str, identity: str) -> dict[str, Any]:
    """How the version was made, how it is prompted, and which base it belongs to."""
    training, trained = trained_by(source.version, source.settings, source.hub_id or source.base.name)
    made = published_recipe(source.base, None, None).get(COMMANDS, []) if (source.base / RECIPE).is_file() else []
    return {
        "prompts": source.settings.prompts.model_dump(mode="json"),
        "base": {"name": named or source.base.name, "from_hub": bool(source.hub_id), "identity": identity},
        "training": training,
        COMMANDS: [*([] if source.settings.inference.model == "tiny" else made), *trained],
        "adapter_hash": source.version.adapter_hash,
        "lora": {key: read_object(source.adapter / ADAPTER_FILES[0]).get(key) for key in ("r", "lora_alpha", "target_modules")},
    }
