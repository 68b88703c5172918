"""Builds a run's settings from layers, later ones win: preset, TOML files, command-line flags. The run's folder stores the
resolved tree, from which a resumed run starts."""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from entente.decoding.model_files import chat_template, downloaded, hub_config, may_be_hub_id, read_config, recipe_prompts
from entente.game.prompts import PromptSettings
from entente.settings.check_settings import check_settings
from entente.settings.find_model import TINY
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.read_file import read_text
from entente.telemetry.setting_marks import (
    MAY_CHANGE,
    STAYS,
    ChangeRule,
    change_rule,
    leaves,
    setting_names,
    similar_names,
)
from entente.training.settings import TinyModelSettings, usual_rate
from storage.adapters import published_versions
from storage.files import folders_in
from storage.ledger import check_ledgers, recorded_steps
from storage.runs import RunPaths, check_name, resolve_run, run_names

_LARGEST_FILE = 1 << 17  # bytes, ten times what all settings need
_LONGEST_VALUE = 300  # a query of `storage.selection` may have pages
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_WIDEST = 1 << 20  # of models, a hundred times over
_FETCHED = {"runs/_models/smollm2": 576}  # width of a preset's model that need not be in this folder
_PRESETS = Path(__file__).with_name("presets")
DEFAULT_PRESET = "laptop"
_TABLE = "reward_weights"
"""The one setting whose value is a table."""


def read_settings_file(file: Path) -> dict[str, Any]:
    """The unchecked tree in a TOML settings file; raises InputError if the file cannot be read or is not TOML."""
    text = read_text(file, at_most=_LARGEST_FILE, what="settings file")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number with thousands of digits, or too deep
        raise InputError(f"settings file '{file}' cannot be read: {error}") from error


def preset_names() -> list[str]:
    return sorted(file.stem for file in _PRESETS.glob("*.toml"))


def _preset_tree(preset: str) -> dict[str, Any]:
    if preset not in preset_names():
        raise InputError(f"there is no preset '{preset}'; known: {', '.join(preset_names())}")
    return read_settings_file(_PRESETS / f"{preset}.toml")


def deployed_preset(preset: str, over: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A build step of `prefect deploy`: the parameter `settings` from a preset (InputError if unknown), overridden by `over`.
    Stores all values: Prefect's UI sends every value of its form, so a flow cannot distinguish a default from a choice."""
    return {"settings": merge_layers(_preset_tree(preset), over or {})}


def layered_settings(preset: str, files: Iterable[Path] = (), overrides: Mapping[str, Any] | None = None) -> RunSettings:
    """Checked settings from a preset, TOML files and overrides; later layers win. Raises InputError for an unknown preset, an
    unreadable file, and unknown, invalid or contradictory settings."""
    layers = [_preset_tree(preset), *(read_settings_file(file) for file in files), overrides or {}]
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge_layers(merged, layer)
    merged = _with_usual_rate(merged, layers)
    if (prompts := _prompts_of_base(_name_of_base(merged))) is not None:
        merged = merge_layers({"prompts": prompts.model_dump()}, merged)
    try:
        settings = RunSettings.model_validate(merged)
    except ValidationError as error:
        raise InputError(one_sentence(error)) from error
    check_settings(settings)
    return settings


def _with_usual_rate(tree: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Set the usual learning rate for the width of the model, if only the preset sets a rate and its model has another width.
    A model has one rate, whether a folder, a hub id or a recipe names it."""
    rated = any("learning_rate" in training for layer in layers[1:] if isinstance(training := layer.get("training"), Mapping))
    preset, name = _name_of_base(layers[0]), _name_of_base(tree)
    if rated or not name or (name == preset and name != TINY):
        return dict(tree)
    if _folder_of_base(name) is None and (rate := _rate_in_presets(name)):
        return merge_layers(tree, {"training": {"learning_rate": rate}})
    width = _width(tree, ask=True)
    if width is None or width == _width(layers[0], ask=False):
        return dict(tree)
    return merge_layers(tree, {"training": {"learning_rate": usual_rate(width)}})


def _rate_in_presets(name: str) -> float | None:
    """The learning rate of the preset with this hub id, which needs no request to the hub."""
    trees = map(_preset_tree, preset_names())
    return next(
        (tree["training"]["learning_rate"] for tree in trees if may_be_hub_id(name) and _name_of_base(tree) == name), None
    )


def _width(tree: Mapping[str, Any], *, ask: bool) -> int | None:
    """Hidden width of the model in a settings tree; None if unknown or invalid, which a later check refuses. With `ask`, reads
    the config of a model that is not downloaded from the hub; raises InputError if the hub lacks it or does not answer."""
    name = _name_of_base(tree)
    folder = _folder_of_base(name)
    if name == TINY:
        recipe = tree.get("tiny_model")
        width = recipe.get("hidden", TinyModelSettings().hidden) if isinstance(recipe, Mapping) else TinyModelSettings().hidden
    elif folder is not None and (folder / "config.json").is_file():
        width = read_config(folder).get("hidden_size")
    else:
        width = hub_config(name).get("hidden_size") if ask and may_be_hub_id(name) else _FETCHED.get(name)
    return width if isinstance(width, int) and 0 < width < _WIDEST else None


def rate_warning(rate: float, width: int) -> str:
    """A warning if the rate differs tenfold from the usual one for this hidden width; else ""."""
    usual = usual_rate(width)
    if usual / 10 < rate < usual * 10:
        return ""
    return f"training.learning_rate {rate:g} is far from {usual:g}, which suits a model {width} wide"


def _prompts_of_base(name: str) -> PromptSettings | None:
    folder = _folder_of_base(name)
    return None if folder is None else recipe_prompts(folder)


def _name_of_base(tree: Mapping[str, Any]) -> str:
    """The base model in a settings tree; "" if invalid, which a later check refuses."""
    inference = tree.get("inference")
    model = inference.get("model") if isinstance(inference, Mapping) else None
    return model if isinstance(model, str) and "\0" not in model else ""


def _folder_of_base(name: str) -> Path | None:
    if not name or name == TINY:
        return None
    return Path(name) if Path(name).is_dir() else downloaded(name) if may_be_hub_id(name) else None


def check_prompts(settings: RunSettings) -> None:
    """Raise InputError if a base model made here would get other prompts than in its training."""
    made_for, folder = _prompts_of_base(settings.inference.model), _folder_of_base(settings.inference.model)
    if made_for is None or folder is None:
        return
    for name in PromptSettings.model_fields:
        wanted, value = getattr(made_for, name), getattr(settings.prompts, name)
        if wanted != value and (name != "chat" or chat_template(folder) is not None):  # as a step of a chat model has
            raise InputError(
                f"model '{settings.inference.model}' was made for prompts.{name} {wanted!r}, not for {value!r}: leave the "
                "setting out, or make a model for these prompts"
            )


def resumed_settings(files: Iterable[Path] = (), overrides: Mapping[str, Any] | None = None) -> RunSettings:
    """The stored settings of a run, changed by files and overrides. Raises InputError if no run is named, it does not exist,
    or a fixed setting would change."""
    changes: dict[str, Any] = {}
    for layer in [*(read_settings_file(file) for file in files), overrides or {}]:
        changes = merge_layers(changes, layer)
    run, root = changes.get("run"), changes.get("runs_root", "runs")
    if not run or not isinstance(run, str):
        raise InputError("--resume continues an existing run: name it with --run")
    if not isinstance(root, str | Path):
        raise InputError(f"runs_root: input is not a path, got {root!r}")
    root = Path(root)
    changes["run"] = run = resolve_run(root, run)
    stored = settings_of(RunPaths(root / check_name(run, "run")))
    try:
        settings = RunSettings.model_validate(merge_layers(stored.model_dump(), {**changes, "runs_root": root}))
    except ValidationError as error:
        raise InputError(one_sentence(error)) from error
    check_resumed(stored, settings)
    check_settings(settings)
    return settings


def changed_settings(stored: RunSettings, wanted: RunSettings) -> dict[str, list[Any]]:
    """Dotted name, as in TOML -> [before, after] of changed settings that affect rows or weights."""
    before, after = (leaves(each.model_dump(mode="json"), spell=toml_key) for each in (stored, wanted))
    differ = (name for name in before | after if before.get(name) != after.get(name))
    return {name: [before.get(name), after.get(name)] for name in differ if _rule(name) is not MAY_CHANGE}


def _rule(name: str) -> ChangeRule:
    return change_rule(RunSettings, name.split("."))


_OTHER_RUN = "leave it out, or begin another run, from a step of this one with --init-from"


def check_resumed(stored: RunSettings, wanted: RunSettings, cure: str = _OTHER_RUN) -> None:
    """Raise InputError, with setting, both values and `cure`, if `wanted` changes a fixed setting."""
    for name, (before, after) in changed_settings(stored, wanted).items():
        if _rule(name) is STAYS:
            raise InputError(
                f"run '{stored.run}' was started with {name} {_in_short(before)} and cannot continue with {_in_short(after)}: "
                f"{cure}"
            )


def check_what_is_there(settings: RunSettings, *, resume: bool) -> None:
    """Refuse a name that is taken, and settings or ledgers that a resumed run cannot use. Repeat this under the run's lock."""
    if resume:
        check_resumed(settings_of(settings.paths), settings)
        check_steps(settings, max(published_versions(settings.paths), default=0))
        check_ledgers(settings.paths, settings.storage)
    elif settings.run and settings.paths.settings.exists():
        raise InputError(
            f"run '{settings.run}' exists already in {settings.runs_root}: continue it with --resume, "
            "or choose another name with --run"
        )
    elif settings.run and (recorded_steps(settings.paths) or folders_in(settings.paths.shards)):
        raise InputError(
            f"'{settings.paths.root}' has rows of a run, whose settings.json is missing: restore that file from a copy, or "
            "choose another name with --run"
        )


def check_steps(settings: RunSettings, done: int) -> None:
    """Raise InputError if the run has done more steps than its settings want."""
    if done > settings.steps:
        raise InputError(
            f"run '{settings.run}' has done {done} steps, more than steps {settings.steps}: set --steps to {done} or more"
        )


def _in_short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({sha256(text.encode()).hexdigest()[:8]})"


def toml_key(name: str) -> str:
    """Quoted if TOML needs it, as for a reward named `module:attribute`."""
    return name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def settings_of(paths: RunPaths) -> RunSettings:
    """The settings of an existing run, with name, root and model path adapted to its current folder, to which it may have been
    copied. Raises InputError if there is no such run or its settings are unusable."""
    if not paths.settings.exists():
        others = [name for name in run_names(paths.root.parent) if RunPaths(paths.root.parent / name).settings.exists()]
        there = f"; runs there: {', '.join(others[-5:])}" if others else ""
        raise InputError(f"there is no run in '{paths.root}': it has no settings.json{there}")
    try:
        return _relocated(RunSettings.model_validate(json.loads(paths.settings.read_bytes())), paths)
    except ValidationError as error:
        raise InputError(f"'{paths.settings}' is not of this version or was changed: {one_sentence(error)}") from error
    except ValueError as error:
        raise InputError(f"'{paths.settings}' cannot be used: {error}") from error


def _relocated(settings: RunSettings, paths: RunPaths) -> RunSettings:
    root, model = paths.root.parent, settings.inference.model
    if settings.runs_root.parts and Path(model).is_relative_to(settings.runs_root):
        copied = root / Path(model).relative_to(settings.runs_root)
        model = str(copied) if copied.is_dir() else model
    inference = settings.inference.model_copy(update={"model": model})
    return settings.model_copy(update={"run": paths.root.name, "runs_root": root, "inference": inference})


def one_sentence(error: ValidationError) -> str:
    """Pydantic's first error with the setting's dotted name, and the number of further errors."""
    first, *others = error.errors()
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = tuple(setting_names(RunSettings)) if error.title == RunSettings.model_config.get("title") else ()
        meant = " or ".join(similar_names(name, known))
        text = f"there is no setting '{name}'" + (f"; did you mean {meant}?" if meant else "")
    elif first["type"] == "value_error":
        # The message of a class's own check suffices; the input would be the whole table.
        text = f"{name}: {first.get('ctx', {}).get('error', first['msg'])}".removeprefix(": ")
    else:
        text = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first.get('input')!r}"
    return text + (f" (and {len(others)} more)" if others else "")


def merge_layers(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Merge sections; a setting, also one that is a table, is replaced as a whole."""
    merged = dict(base)
    for key, value in layer.items():
        inner = merged.get(key) if key != _TABLE else None
        merged[key] = merge_layers(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged
