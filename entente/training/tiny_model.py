"""Makes the tiny model: no download, about a minute of CPU.

It imitates a scripted player: on random weights, LoRA reaches only half the gain. BPE tokenizer, Qwen3 of less than a million
parameters, cached by recipe hash. An interrupted attempt leaves nothing.
"""

import shutil
from pathlib import Path

from entente.decoding.model_files import RECIPE, make_whole
from entente.game.prompts import DEFAULT_PROMPTS, PromptSettings
from entente.training.imitation.imitate import Imitation, prepare, write_model
from entente.training.imitation.positions import Positions
from entente.training.imitation.settings import ImitationSettings
from entente.training.imitation.teacher_games import OnProgress, make_games
from entente.training.settings import TINY_TEACHER, TINY_VOCABULARY, TinyModelSettings, recipe_hash


def make_tiny_model(
    root: Path, settings: TinyModelSettings, on_progress: OnProgress | None = None, prompts: PromptSettings = DEFAULT_PROMPTS
) -> Path:
    """Unless it exists; returns `root`/tiny-<recipe hash>, in the layout of `save_pretrained`."""
    final = root / f"tiny-{recipe_hash(settings, prompts)}"
    report = on_progress or (lambda stage, done, total: None)
    return make_whole(final, RECIPE, lambda folder: _make(folder, settings, prompts, report))


def _make(folder: Path, settings: TinyModelSettings, prompts: PromptSettings, report: OnProgress) -> None:
    imitation = ImitationSettings(
        teachers=(TINY_TEACHER,),
        games=settings.source_games,
        vocabulary=TINY_VOCABULARY,
        hidden=settings.hidden,
        layers=settings.layers,
        steps=settings.imitation_steps,
        positions=settings.imitation_positions,
        lr_schedule="linear",
        prompt_weight=1.0,  # so few steps leave no other way to learn to read the board
        prompts=prompts,
    )
    positions = Positions(make_games(folder / "games", imitation, 1, report), imitation.games)
    prepare(folder, imitation, positions)
    trained = Imitation(folder, imitation, positions)
    while trained.state.step < imitation.steps:
        trained.step()
        report("imitation", trained.state.step, imitation.steps)
    shutil.rmtree(folder / "games")
    write_model(trained, folder, {"settings": settings.model_dump(), "loss": trained.state.losses})
