"""`entente model`: make and show the tiny model."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from cli.dry_run import show_plan
from cli.options import DryRun, PlanAsJson
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from training.settings import TinyModelSettings

app = App(name="model", help="The tiny model, which is made on this machine.")


@app.command
def make(
    *,
    runs_root: Annotated[Path, Parameter(help="Folder of runs and models.")] = Path("runs"),
    dry_run: DryRun = False,
    json: PlanAsJson = False,
    recipe: Annotated[TinyModelSettings | None, Parameter(name="*", help="Any setting of the recipe.")] = None,
    prompts: Annotated[PromptSettings | None, Parameter(help="Form of the prompts that it is trained on.")] = None,
) -> None:
    """Train a tokenizer and a tiny model that imitates a scripted player. The same recipe is made only once.

    Examples

        entente model make

        entente model make --hidden 192 --layers 4 --imitation-steps 400

        entente model make --prompts.order-notation slot
    """
    if dry_run:
        from pipeline.plans.plan_run import plan_model

        return show_plan(plan_model(recipe or TinyModelSettings(), runs_root, prompts or DEFAULT_PROMPTS), json=json)
    from cli.screen import progress_shown
    from game.players import player
    from pipeline.run_settings import MODEL_FOLDER
    from pipeline.threads import apply_threads, usable_cores
    from telemetry.progress import reporter

    recipe = recipe or TinyModelSettings()
    player(recipe.teacher)  # an unknown name is refused before the work starts
    apply_threads(usable_cores())
    from training.tiny_model import make_tiny_model

    with progress_shown():
        path = make_tiny_model(
            runs_root / MODEL_FOLDER,
            recipe,
            lambda stage, done, total: reporter().stage(f"tiny model: {stage}", done, total),
            prompts or DEFAULT_PROMPTS,
        )
    print(path)


@app.command
def show(model: Annotated[str, Parameter(help="A folder or a hub id.")]) -> None:
    """Show a model: size, vocabulary, longest sequence, chat format, and its recipe if it was made here.

    Example

        entente model show runs/_models/tiny-0123456789ab
    """
    from decoding.codec import Codec
    from decoding.model_files import max_position, model_fingerprint, resolve_model
    from decoding.prompt_form import PromptForm

    folder = resolve_model(model)
    codec = Codec(folder)
    form = PromptForm(codec, DEFAULT_PROMPTS)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{folder}\nfingerprint {model_fingerprint(folder)}, weights {size / 1e6:.1f} MB")
    print(f"vocabulary {codec.vocabulary_size}, longest sequence {max_position(folder)} tokens")
    print(f"chat format {form.chat.description}")
    if (folder / "recipe.json").is_file():
        print(f"recipe {jsonlib.dumps(jsonlib.loads((folder / 'recipe.json').read_text()))}")
