"""Settings of a base model that imitates a teacher."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from entente.game.prompts import DEFAULT_PROMPTS, PromptSettings
from entente.game.scripted import SEARCHES, player
from entente.telemetry.errors import InputError
from entente.telemetry.setting_marks import Seed, Settings, all_layers_merged
from entente.training.settings import TrainingSettings

_WARM_UP_SHARE = 0.05
"""Share of the steps that warm up the learning rate; short, because the network is small."""


class ImitationSettings(Settings):
    """Whose games are imitated, by which network, and how long."""

    teachers: Annotated[tuple[str, ...], Field(min_length=1)] = ("dumbbot",)
    """Scripted players whose orders are imitated, sampled anew for each power of each game; a name given twice counts twice.
    'dumbbot+search' searches before it orders, which takes far longer."""
    recorded: tuple[Path, ...] = ()
    """Files of recorded games, JSON objects of the diplomacy package, to imitate instead of scripted players; games that cannot
    be read are skipped."""
    labels: tuple[Path, ...] = ()
    """Folders of labels (`entente label`), whose best order sets are imitated beside the games; of their games too one in 20 is
    held out, and the learning curve is of these."""
    begin_with: Path | None = None
    """Folder of a model that was made here, to go on from; it fixes vocabulary, hidden, layers and prompts."""
    games: Annotated[int, Field(ge=0)] = 1000
    """Games of the teachers, one in 20 of them held out; of recorded games all are taken. 0: labels alone."""
    last_year: Annotated[int, Field(ge=1901, le=1999)] = 1907
    """Last game year of scripted games; by default that of the positions that a run starts from."""
    vocabulary: Annotated[int, Field(ge=300, le=8192)] = 640
    """Maximum vocabulary size of the byte-level BPE tokenizer; with 640, most provinces and units are one token."""
    hidden: Annotated[int, Field(ge=32, multiple_of=32)] = 128
    """Width of the model; a multiple of 32, because vLLM's CPU attention needs heads of 32."""
    layers: Annotated[int, Field(ge=1)] = 4
    """Transformer blocks."""
    steps: Annotated[int, Field(ge=1)] = 2000
    """Optimiser steps."""
    positions: Annotated[int, Field(ge=1)] = 16
    """Positions per step, each with the decisions of all its powers (about 5)."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate of Muon and AdamW, reached after a twentieth of the steps."""
    lr_schedule: Literal["cosine", "linear"] = "cosine"
    """Decay of the learning rate, to a tenth of its peak at the last step."""
    prompt_weight: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Loss weight of a prompt token, relative to 1 for a completion token; with 0 the model does not learn to read the board."""
    eval_every: Annotated[int, Field(ge=1)] = 100
    """Steps between evaluations on held-out games."""
    checkpoint_minutes: Annotated[float, Field(ge=0)] = 5.0
    """Minutes between checkpoints, which do not change the result; 0: one after every step."""
    seed: Seed = 0
    """Seed of games, initial weights and the order of positions."""
    prompts: PromptSettings = DEFAULT_PROMPTS
    """Form of the prompts; a run that uses the model needs the same."""

    @property
    def rates(self) -> TrainingSettings:
        return TrainingSettings(
            learning_rate=self.learning_rate,
            rate_schedule=self.lr_schedule if self.steps > self.warm_up_steps else "constant",
            warm_up_steps=self.warm_up_steps,
            decay_steps=self.steps,
        )

    @property
    def warm_up_steps(self) -> int:
        return max(1, round(_WARM_UP_SHARE * self.steps))

    @property
    def searches(self) -> bool:
        return not self.recorded and any(name.endswith(SEARCHES) for name in self.teachers)

    @model_validator(mode="after")
    def _has_games(self) -> Self:
        if all_layers_merged() and self.games < 2 and not self.recorded and not (self.labels and not self.games):
            raise ValueError(f"games is {self.games}: imitation trains on some and holds out others, or has labels alone (0)")
        return self

    @model_validator(mode="after")
    def _known_teachers(self) -> Self:
        for name in self.teachers:
            try:
                player(name.removesuffix(SEARCHES))
            except InputError as error:
                raise ValueError(str(error)) from error
        return self
