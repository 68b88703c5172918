"""Publishes a small trained policy as one folder that is enough to play with: weights, tokenizer, recipe, card.

The recipe says how the model was made, as settings and as commands, with hashes of the model's files. No file names a folder of
this machine. A published folder never changes.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoding.model_files import RECIPE, recipe_prompts, resolve_model, weights_hash
from evaluation.contestants import Contestant, resolve_contestant
from evaluation.match_files import MatchRecord, read_match
from evaluation.score_files import ScoreRecord, read_score
from evaluation.strength import POLICY
from game.players import SEARCHES
from inference.publish_weights import publish_weights
from pipeline.model_recipe import file_hashes, published_recipe
from pipeline.plans.find_model import model_of
from pipeline.published_folder import copy_tokenizer, folder_size, new_folder, write_config
from pipeline.run_settings import MODEL_FOLDER, RunSettings, settings_at, settings_of
from reports.imitation_plot import CURVE
from reports.model_card import CARD, model_card
from storage.files import FILES
from storage.json_files import read_object
from storage.runs import RunPaths, durable_write
from telemetry.errors import InputError

MOST_BYTES = 8_000_000
"""Largest folder that is published, bytes: it lies in a repository that everybody clones."""
CARD_ROOM = 20_000
"""Bytes left for recipe and card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSource:
    """What is published: a base model, or a version of a run."""

    base: Path
    """Folder of the base model."""
    name: str
    """Of a model its folder's name; of a version 'mine:v20'."""
    version: Contestant | None = None
    run: RunPaths | None = None
    """Of the version."""

    @property
    def adapter(self) -> Path | None:
        return None if self.version is None else self.version.adapter

    def settings(self) -> RunSettings | None:
        """The settings with which the version was trained."""
        if self.run is None or self.version is None:
            return None
        return settings_at(self.run, self.version.version) if self.version.version else settings_of(self.run)


def find_source(name: str, runs_root: Path) -> PublishSource:
    """The model in `runs_root`/_models or folder called `name`, else the version ('mine:v20'), or the newest of the run 'mine'.

    Raises:
        InputError: there is no such model or version, or its base has no recipe.
    """
    made = FILES.fetch_folder(runs_root / MODEL_FOLDER / name)
    version, run = None, None
    if ":" not in name and made.is_dir():
        base = resolve_model(made)
    elif ":" not in name and Path(name, RECIPE).is_file():
        base = resolve_model(name)
    else:
        if ":" not in name and not FILES.exists(runs_root / name / "settings.json"):
            raise InputError(f"there is no model '{name}' in '{runs_root / MODEL_FOLDER}' and no run of that name: name one")
        version = resolve_contestant(name if ":" in name else f"{name}:newest", "", runs_root)
        run = RunPaths(runs_root / version.run)
        base = model_of(settings_of(run), runs_root, version.run)
    if not (base / RECIPE).is_file() or (version is None and recipe_prompts(base) is None):
        raise InputError(
            f"model '{base.name}' has no {RECIPE} with its prompts: publish a model that was made here, or a version of one"
        )
    return PublishSource(base=base, name=base.name if version is None else version.name, version=version, run=run)


def publish_model(source: PublishSource, to: Path, runs_root: Path, figures: Sequence[Path] = ()) -> Path:
    """Write the folder `to`.

    Args:
        figures: files of matches and scores in which the model was measured; their figures are in the card.

    Raises:
        InputError: the folder exists, the model is too large, or a file of figures is not about it.
        DataError: a file of figures or the adapter is damaged.
    """
    with new_folder(to, runs_root) as folder:
        _copy_files(source, folder)
        room = MOST_BYTES - CARD_ROOM - folder_size(folder)
        dtype = publish_weights(source.base, source.adapter, folder, room)
        write_config(source.base, folder, dtype)
        matches, scores = _figures(source, weights_hash(folder), figures)
        recipe = published_recipe(source.base, source.version, source.settings()) | {
            "weights": dtype,
            "files": file_hashes(folder),
        }
        durable_write(folder / RECIPE, json.dumps(recipe, indent=1).encode())
        shown = f"models/{to.name}" if to.is_absolute() else to.as_posix()
        card = model_card(shown, recipe, matches, scores, has_curve=(folder / CURVE).is_file())
        durable_write(folder / CARD, card.encode())
        if (size := folder_size(folder)) > MOST_BYTES:
            raise InputError(
                f"the folder takes {size / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:.0f} MB: publish a smaller model"
            )
    return to


def _copy_files(source: PublishSource, folder: Path) -> None:
    copy_tokenizer(source.base, folder)
    if source.version is None and (source.base / CURVE).is_file():
        shutil.copyfile(source.base / CURVE, folder / CURVE)


def _figures(
    source: PublishSource, published: str, files: Sequence[Path]
) -> tuple[list[tuple[MatchRecord, str]], list[ScoreRecord]]:
    """Matches, each with the model's name there, and scores.

    Args:
        published: hash of the published weights.
    """
    matches, scores, version = list[tuple[MatchRecord, str]](), list[ScoreRecord](), source.version
    known = {published} if version is not None else {published, weights_hash(source.base)}
    for file in files:
        if not file.is_file():
            raise InputError(f"there is no file '{file}' with figures: name one of a match or of a score")
        if "table" not in read_object(file):
            scores.append(_score(source, file))
            continue
        match = read_match(file)
        same = [
            player.name
            for player in match.players
            if player.weights_hash in known
            or (version is not None and (player.run, player.adapter_hash) == (version.run, version.adapter_hash))
        ]
        measured = [name for name in same if name in match.settings.players]
        if not measured:
            raise InputError(f"'{source.name}' is none of the players measured in '{file}': leave the file out")
        matches.append((match, measured[0].removesuffix(SEARCHES)))
    return matches, scores


def _score(source: PublishSource, file: Path) -> ScoreRecord:
    """A score of the version."""
    found = None
    if source.run is not None and file.resolve().is_relative_to(source.run.scores.resolve()):
        found = read_score(source.run, file.resolve().relative_to(source.run.scores.resolve()).with_suffix("").as_posix())
    if found is None or source.version is None or (found.player, found.policy_version) != (POLICY, source.version.version):
        raise InputError(f"'{file}' holds no score of '{source.name}': leave the file out")
    return found
