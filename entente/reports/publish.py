"""Writes policies as portable folders: `entente export` and `entente model publish`.

An export holds an adapter, or with `merged` the full merged weights, for transformers, peft, vLLM and the hub. A published
model is a folder of at most MOST_BYTES with merged weights. Each folder has a model card and a recipe with file hashes, is
published atomically by a rename, and contains no local paths.
"""

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from entente import inference, reports
from entente.decoding.base_identity import base_identity, file_hash, weights_hash
from entente.decoding.model_files import RECIPE, read_config, recipe_prompts, resolve_model
from entente.decoding.weight_files import INDEX, stored_tensors, weight_files
from entente.evaluation.adapter_folders import check_weights
from entente.evaluation.contestants import resolve_contestant
from entente.inference.publish_weights import publish_weights
from entente.inference.server_arguments import slot_rank
from entente.records.policy_version import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from entente.reports.plots import CURVE
from entente.reports.published_figures import Source, in_words, match_figures, measured_figures
from entente.settings.find_model import model_of
from entente.settings.layers import changed_settings, layered_settings, settings_of, toml_key
from entente.telemetry.errors import InputError
from entente.telemetry.setting_marks import leaves
from entente.training.fetch_model import name_to_fetch
from storage.files import durable_write, new_folder
from storage.json_files import read_object
from storage.runs import MODEL_FOLDER, RunPaths, hashes_file

CARD = "README.md"
BASE_FOLDER = "base"
MOST_BASE_BYTES = 16_000_000
MOST_BYTES = 12_000_000
"""Size limit of a published model: every clone of the repository downloads it."""
_CARD_BYTES = 20_000
_PROGRAM = Path(inference.__file__).with_name("legal_orders.py")
"""Standalone script that samples under the legal mask; it is copied into the folder, not imported here."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_PATH_KEYS = ("_name_or_path", "name_or_path")
"""Keys of a saved config that may hold a local path."""
_PRESET = "laptop"


def find_version(name: str, runs_root: Path) -> Source:
    """The version that a name like 'mine:v20' refers to.

    Raises InputError if it or its base is missing, DataError if its adapter is damaged."""
    version = resolve_contestant(name, "", runs_root)
    run = RunPaths(runs_root / version.run)
    settings = settings_of(run)
    return Source(base=model_of(settings, runs_root, version.run), version=version, run=run, settings=settings)


def find_model(name: str, runs_root: Path) -> Source:
    """What `name` refers to: a model in `runs_root`/_models, a folder, a version ('mine:v20'), or a run's newest version."""
    made, run = runs_root / MODEL_FOLDER / name, runs_root / name / "settings.json"
    if ":" in name:
        source = find_version(name, runs_root)
    elif made.is_dir() or Path(name, RECIPE).is_file():
        if "/" not in name and run.exists():
            folder = made if made.is_dir() else f"./{name}"
            raise InputError(f"'{name}' is a model and a run: give '{folder}' for the model, or '{name}:newest' for the run")
        source = Source(base=resolve_model(made if made.is_dir() else name))
    elif run.exists():
        source = find_version(f"{name}:newest", runs_root)
    else:
        raise InputError(f"there is no model '{name}' in '{runs_root / MODEL_FOLDER}' and no run of that name: name one")
    if not (source.base / RECIPE).is_file() or (source.version is None and recipe_prompts(source.base) is None):
        raise InputError(
            f"model '{source.base.name}' has no {RECIPE} with its prompts: publish one that was made here, or a version of one"
        )
    return source


def export_adapter(source: Source, to: Path, runs_root: Path, *, merged: bool = False) -> Path:
    """Write a version's adapter to the new folder `to`, plus its base if that cannot be fetched; with `merged`, full weights.

    Raises InputError if the version is the base model itself, the folder exists, the base can neither be fetched nor included,
    or merging loses too much precision; DataError if an adapter, score or match file is damaged.
    """
    if source.adapter is None or source.version is None or source.settings is None:
        raise InputError(
            f"'{source.name}' is a base model and has no adapter: name a version from 1 on, or publish the base with "
            "`entente model publish`"
        )
    check_weights(source.version.policy, source.base)
    base, fetched = source.base, name_to_fetch(source.base)
    named = source.hub_id or (f"runs/{MODEL_FOLDER}/{fetched}" if fetched else "")
    config = read_object(source.adapter / ADAPTER_CONFIG)
    with _new_folder(to, runs_root) as folder:
        if merged:
            _copy_tokenizer(source.base, folder)
            dtype = publish_weights(source.base, source.adapter, folder)
            _write_config(source.base, folder, _rope_before_5(read_config(source.base)) | {"dtype": dtype})
        else:
            if not named:
                base, named = folder / BASE_FOLDER, BASE_FOLDER
                _copy_base(source.base, base)
            (folder / ADAPTER_CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": named}, indent=2) + "\n")
            shutil.copyfile(source.adapter / ADAPTER_WEIGHTS, folder / ADAPTER_WEIGHTS)
        shutil.copyfile(_PROGRAM, folder / _PROGRAM.name)
        recipe = _training(source) | {
            "base": {
                "name": named or base.name,
                "from_hub": bool(source.hub_id),
                "fetched": fetched,
                "identity": base_identity(base, hashes_file(runs_root)),
            },
            "adapter_hash": source.version.adapter_hash,
            "lora": {key: config.get(key) for key in ("r", "lora_alpha", "target_modules")},
        }
        rank = slot_rank(recipe["lora"]["r"])
        _finish(folder, to.name, recipe, "adapter_card.md.jinja", measured_figures(source, "", ()), merged=merged, rank=rank)
    return to


def publish_model(
    source: Source, to: Path, runs_root: Path, figures: Sequence[Path] = (), *, most_bytes: float = MOST_BYTES
) -> Path:
    """Write a small model to the new folder `to`; for a version, its adapter is merged into the base.

    Args:
        figures: match files whose results go on the card; those of a version's run are always included.
        most_bytes: size limit of the folder; weights that would exceed it are rounded to bfloat16.

    Raises:
        InputError: the folder exists, the model is too large, or it did not play in one of the match files.
    """
    with _new_folder(to, runs_root) as folder:
        _copy_tokenizer(source.base, folder)
        if source.version is None and (source.base / CURVE).is_file():
            _copy(source.base, CURVE, folder)
        base = _base_recipe(source.base)  # of a long imitation, with a curve of hundreds of points
        taken = sum(file.stat().st_size for file in folder.iterdir()) + len(json.dumps(base, indent=1))
        dtype = publish_weights(source.base, source.adapter, folder, most_bytes - _CARD_BYTES - taken)
        rope = _rope_before_5(read_config(source.base)) if source.adapter is not None else {}  # a base keeps its config's bytes
        _write_config(source.base, folder, rope | {"dtype": dtype})
        recipe = {"parameters": _parameters(folder)} | base | _training(source) | {"weights": dtype}
        if "training" in base and recipe["training"] != base["training"]:  # the base is a version of an earlier run
            recipe["earlier"] = [*base.get("earlier", ()), base["training"]]
        name = f"models/{to.name}" if to.is_absolute() else f"./{to.name}" if to.parent == Path() else to.as_posix()
        measured = measured_figures(source, weights_hash(folder), figures)
        _finish(folder, name, recipe, "model_card.md.jinja", measured, has_curve=(folder / CURVE).is_file())
    return to


def _base_recipe(base: Path) -> dict[str, Any]:
    return _without_folders({"settings": {}} | (read_object(_own_file(base, RECIPE)) if (base / RECIPE).is_file() else {}))


def _without_folders(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Without the folders of this machine in its settings, and in those of the models that it goes on from."""
    settings = dict(recipe.get("settings", {}))
    for files in ("recorded", "labels"):
        if settings.get(files):
            settings[files] = [Path(file).name for file in settings[files]]
    if "begin_with" in settings:
        settings["begin_with"] = _place(Path(settings["begin_with"]))
    begun = {"begun_with": _without_folders(recipe["begun_with"])} if "begun_with" in recipe else {}
    return {**recipe, "settings": settings, **begun}


def _parameters(folder: Path) -> int:
    return sum(tensor.size for tensor in stored_tensors(folder).values())


def _training(source: Source) -> dict[str, Any]:
    """Prompts; for a trained version also learning rate, and settings that differ from the preset."""
    if source.version is None or source.settings is None or source.run is None:
        return {}
    prompts = {"prompts": source.settings.prompts.model_dump(mode="json")}
    if not source.version.version:
        return prompts
    preset = layered_settings(_PRESET)
    settings = {name: after for name, (_, after) in changed_settings(preset, source.settings).items()}
    if (depth := source.settings.pipeline.buffer_depth) != preset.pipeline.buffer_depth:  # a resumed run may change it
        settings["pipeline.buffer_depth"] = depth  # how old the rows of a step are
    if any(name.startswith("storage.reward_weights.") for name in settings):  # a file replaces the preset's weights as a whole
        weights = source.settings.storage.reward_weights
        settings |= leaves({"storage": {"reward_weights": weights}}, spell=toml_key)
    settings["training.learning_rate"] = source.settings.training.learning_rate  # the default depends on the model's width
    if "inference.model" in settings:
        settings["inference.model"] = source.hub_id or _place(source.base)
    if "rollouts.horizon_schedule" in settings:  # a run of so many steps is refused horizons that begin later
        begun = [f"{first}:{years}" for first, years in source.settings.rollouts.horizons if first <= source.version.version]
        settings["rollouts.horizon_schedule"] = ",".join(begun)
    training = {"run": source.version.run, "version": source.version.version, "preset": _PRESET, "settings": settings}
    return prompts | {"training": training}


def _place(base: Path) -> str:
    return {MODEL_FOLDER: f"runs/{MODEL_FOLDER}/", "models": "models/"}.get(base.parent.name, "") + base.name


def _finish(folder: Path, name: str, recipe: dict[str, Any], template: str, figures: Mapping[str, Any], **context: Any) -> None:
    """Write the recipe and the model card. `name`: what the card calls the folder, and the model in match results."""
    hashes = {file.relative_to(folder).as_posix(): file_hash(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    recipe |= {"files": hashes}
    durable_write(folder / RECIPE, json.dumps(recipe, indent=1).encode())
    loader = FileSystemLoader(Path(reports.__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shell"] = shlex.quote
    card = environment.get_template(template)
    matches = [match_figures(match, known_as, name) for match, known_as in figures["matches"]]
    scores = {kind: [in_words(score) for score in figures[kind]] for kind in ("scores", "base_scores")}
    made = dict(recipe.get("settings", {}))
    if "begin_with" not in made:
        made |= {f"prompts.{key}": value for key, value in recipe["prompts"].items()}
    text = card.render(name=name, recipe=recipe, made=made, matches=matches, **scores, **context)
    durable_write(folder / CARD, text.encode())


@contextmanager
def _new_folder(to: Path, runs_root: Path) -> Iterator[Path]:
    if to.exists():
        raise InputError(f"'{to}' exists, and a published model never changes: choose another folder, or remove it")
    local = {str(path.resolve()) for path in (Path.cwd(), Path.home(), runs_root, to.parent)} - {"/"}
    with new_folder(to) as aside:
        yield aside
        for file in filter(Path.is_file, aside.rglob("*")):
            content = file.read_bytes()
            # JSON writes what is not ASCII, and quotes, in another way.
            if named := [path for path in local if path.encode() in content or json.dumps(path)[1:-1].encode() in content]:
                raise InputError(f"'{file.name}' contains the local path '{named[0]}': remove it from the model's files")


def _copy_base(base: Path, folder: Path) -> None:
    """Copy a small base model byte for byte, so that its `base_identity` is unchanged; only local paths are removed."""
    if (size := sum(file.stat().st_size for file in weight_files(base))) > MOST_BASE_BYTES:
        raise InputError(
            f"the base model '{base.name}' is a local folder with {size / 1e6:.0f} MB of weights, more than the "
            f"{MOST_BASE_BYTES / 1e6:.0f} MB that can be included: export with --merged, or train on a model that can be fetched"
        )
    folder.mkdir()
    _copy_tokenizer(base, folder)
    for file in (*weight_files(base), base / INDEX):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    _write_config(base, folder, {})
    if (base / RECIPE).is_file():
        (folder / RECIPE).write_text(json.dumps(_base_recipe(base), indent=1))


def _copy_tokenizer(base: Path, folder: Path) -> None:
    for name in _TOKENIZER:
        if (base / name).is_file():
            _copy(base, name, folder)
    if (file := folder / "tokenizer_config.json").is_file():
        file.write_text(json.dumps(_without_paths(read_object(file)), indent=2) + "\n")


def _copy(base: Path, name: str, folder: Path) -> None:
    shutil.copyfile(_own_file(base, name), folder / name)


def _own_file(base: Path, name: str) -> Path:
    """A file of the model in `base`. Raises InputError if it is a link out of that folder: a stranger's model could name any file
    of this machine so, and what it says is published."""
    base = base.resolve()
    # In the hub's cache the files of a model are links to the blobs beside its snapshots.
    places = (base, base.parent.parent / "blobs") if base.parent.name == "snapshots" else (base,)
    if not any((base / name).resolve().is_relative_to(place) for place in places):
        raise InputError(f"'{base / name}' is a link to a file elsewhere, which would be published: put the file itself there")
    return base / name


def _write_config(base: Path, folder: Path, changed: Mapping[str, Any]) -> None:
    """Copy generation_config.json, and config.json with the `changed` keys; byte for byte if no key changes."""
    if (base / "generation_config.json").is_file():
        _copy(base, "generation_config.json", folder)
    config = read_config(base)
    if (wanted := {**_without_paths(config), **changed}) == config:
        _copy(base, "config.json", folder)
    else:
        (folder / "config.json").write_text(json.dumps(wanted, indent=2) + "\n")


def _rope_before_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of rotary embeddings that transformers before 5 reads, and vLLM with it: they ignore `rope_parameters`, which is all
    that transformers 5 saves, and would compute with a `rope_theta` of 10,000. Empty for a config that has them, or one rope for
    each kind of layer."""
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in config or "rope_theta" not in rope:
        return {}
    theta, scaling = {"rope_theta": rope["rope_theta"]}, {key: rope[key] for key in rope if key != "rope_theta"}
    return theta if rope.get("rope_type", "default") == "default" else theta | {"rope_scaling": scaling}


def _without_paths(content: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in _PATH_KEYS}
