"""Settings of training, and the tiny model's name, which is a hash of them. docs/training.md has the sources of the defaults."""

import hashlib
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import to_json

from entente.game.prompts import DEFAULT_PROMPTS, PromptSettings, board_text, power_text, rules_text
from entente.telemetry.setting_marks import MAY_CHANGE, Seed, Settings, all_layers_merged, change_rule

OUTLIER_LOW, OUTLIER_HIGH = 1e-4, 100.0
"""Tokens whose ratio to the behaviour policy is outside these bounds are left out: a guard against faults, not a trust region."""
DUAL_CLIP = 3.0
"""Bound of ratio times |advantage| for negative advantages (dual-clip PPO: Ye et al. 2020, arXiv 1912.09729)."""
LOSSES = {"cispo": False, "clipped": False, "dppo": False, "gspo": True, "sequence_mean": True}
"""Built-in losses, and whether their sum is divided by decisions, not by branching tokens; see NAME_loss in
`entente/training/losses.py`."""
MAX_GRADIENT_NORM = 1.0
"""Norm to which gradients are clipped: the usual guard against a rare large step. Adam normalises its steps, so the value matters
little."""
RECIPE_VERSION = 5
"""Part of the hash of a tiny model's recipe; increase it when the recipe changes."""
CARD_SHARE = "ENTENTE_TRAINER_CARD_SHARE"
"""Environment variable of the trainer's processes: largest share of its GPU that each may allocate; unset: no limit."""
KEEP_CHECKPOINTS = 3
"""Newest checkpoints that are kept: two in case the newest is damaged."""
MISMATCH_ROWS = 64
"""Newest rows on which trainer and engine are compared, at most: about 600 tokens, as many as a first step has."""
CPU_TOKENS, GPU_TOKENS = 4096, 8192
"""Unique tokens of a micro-batch on a CPU, where larger ones are not faster, and on a GPU, which this fills; `entente smoke`
measures the most that fits."""
TINY_VOCABULARY = 640
"""Largest vocabulary of a tiny model's byte-level BPE tokenizer: most provinces and units are then one token."""
FINAL_SHARE = 0.1
"""Learning rate after a decay, relative to `learning_rate`; the usual value of cosine schedules."""
TINY_TEACHER = "mover"
"""Scripted player that a tiny model imitates: the weakest worth imitating, so that training can improve much."""


def usual_rate(width: int) -> float:
    """Learning rate for an adapter of a model of this hidden width: 3e-3 (128 / width)^1.5, to one digit.

    Measured at 128 (the tiny model, 3e-3) and 576 (SmolLM2, 3e-4). At 3584, a 7B, it is 2e-5; published LoRA runs with GRPO use
    3e-5 (SkyRL) to 1.7e-4 (AReaL, 1.5B).
    """
    return float(f"{3e-3 * (128 / width) ** 1.5:.0e}")


class TinyModelSettings(Settings):
    """Settings of the tiny model; their hash names the folder that caches it."""

    hidden: Annotated[int, Field(ge=32, multiple_of=32)] = 128
    """Width of the model."""
    layers: Annotated[int, Field(ge=1, le=256)] = 3
    """Transformer blocks."""
    imitation_steps: Annotated[int, Field(ge=1)] = 150
    """Optimiser steps of imitation."""
    imitation_positions: Annotated[int, Field(ge=1)] = 3
    """Positions per imitation step, each with the decisions of all its powers."""
    source_games: Annotated[int, Field(ge=2)] = 48
    """Scripted games whose decisions are imitated; one in 20 is not used."""


class TrainingSettings(Settings):
    """The GRPO step: LoRA, loss, optimiser and micro-batches."""

    lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the adapter."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers of a block that the adapter changes; none: all that the model's family offers."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """Numerator of the adapter's scale, alpha / rank."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-5
    """Peak learning rate of AdamW. If you choose a model of another width than the preset's and no rate, the run takes the usual
    rate of that width."""
    rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or a linear or cosine decay until decay_steps."""
    warm_up_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Step at which a linear or cosine decay ends; no effect on a constant rate."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimiser updates of a step, each on a random share of the advantage groups."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios below 1 - clip_low give no gradient if the advantage is negative."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Ratios above 1 + clip_high give no gradient if the advantage is positive."""
    loss: str = "clipped"
    """Policy loss: clipped, cispo, dppo, gspo, sequence_mean, or your own, module:attribute."""
    importance_cap: Annotated[float, Field(ge=0)] = 0.0
    """Above 0: ratios are taken against the policy at the start of the step, with importance weights of at most this; 0:
    against the policy that sampled the token."""
    advantage_scale: Literal["none", "batch"] = "none"
    """Divisor of advantages: none, or their root mean square in the step."""
    entropy_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean entropy over legal sets, which is maximised; 0: off."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the exact KL divergence from the base model over legal sets; 0: off."""
    legal_mass_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean of -log(legal mass) over the probed tokens; 0: off."""
    token_budget: Annotated[int, Field(ge=0)] = 0
    """Unique tokens of a micro-batch; 0: 4,096 on a CPU, and what fits on a GPU, at most 8,192; halved while memory runs out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward instead of keeping them: a third more work, and far less memory."""
    attention: Literal["ranges", "flex"] = "ranges"
    """Attention over the packed rows: ranges, several calls of torch's fused kernel a layer; flex, one call of flex_attention, on
    a GPU only. `entente smoke` compares the two on a card and recommends one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the frozen base; the adapter is always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the trainer; auto: a GPU if there is one."""
    processes: Annotated[int, MAY_CHANGE, Field(ge=1, le=64)] = 1
    """Processes on this machine that share each update, started by torchrun; each takes a GPU, where there are any."""
    fsdp: Annotated[bool, MAY_CHANGE] = False
    """Keep of the frozen base only a part in each process, and gather block by block (FSDP2)."""
    threads: Annotated[int, MAY_CHANGE, Field(ge=0)] = 0
    """CPU threads of the trainer; 0: planned."""
    seed: Seed = 0
    """Seed of the adapter's initial weights; a run sets it to its own `seed`."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "TrainingSettings":
        if all_layers_merged() and self.rate_schedule != "constant" and self.decay_steps <= self.warm_up_steps:
            raise ValueError(
                f"training.decay_steps {self.decay_steps} must lie after training.warm_up_steps {self.warm_up_steps} for the "
                f"{self.rate_schedule} schedule: name the step at which the rate has fallen, usually the run's number of steps"
            )
        return self

    @model_validator(mode="after")
    def _decay_has_a_schedule(self) -> "TrainingSettings":
        if all_layers_merged() and self.decay_steps and "rate_schedule" not in self.model_fields_set:
            raise ValueError(
                f"training.decay_steps {self.decay_steps} needs a decay: set training.rate_schedule to 'linear' or 'cosine'"
            )
        return self

    def rate_at(self, step: int) -> float:
        """Learning rate of all updates of step `step`, counted from 1.

            rate(s) = learning_rate * w(s) * d(s)
            w(s) = min(1, s / warm_up_steps)                                 1 without a warm-up
            d(s) = 1                                                         constant
            d(s) = 1 - (1 - f) * p                                           linear;  p = part of the way from the warm-up's
            d(s) = f + (1 - f) * (1 + cos(pi p)) / 2,  f = FINAL_SHARE       cosine      end to decay_steps, from 0 to 1

        It needs no state in the checkpoint, so a resumed or repeated step has exactly the same rate.
        """
        rising = min(1.0, step / self.warm_up_steps) if self.warm_up_steps else 1.0
        return self.learning_rate * rising * self._decay(step)

    def _decay(self, step: int) -> float:
        if self.rate_schedule == "constant":
            return 1.0
        part = min(1.0, max(0.0, (step - self.warm_up_steps) / (self.decay_steps - self.warm_up_steps)))
        left = (1 + math.cos(math.pi * part)) / 2 if self.rate_schedule == "cosine" else 1 - part
        return FINAL_SHARE + (1 - FINAL_SHARE) * left


LAST_BITS = frozenset({"token_budget", "gradient_checkpointing", "attention"})
"""Settings that change only rounding. The hash excludes them and the settings that a resumed run may change."""


def settings_hash(training: TrainingSettings) -> str:
    """16 hex digits that ledgers and checkpoints store, over the settings that affect the weights."""
    outside = {name for name in TrainingSettings.model_fields if change_rule(TrainingSettings, [name]) is MAY_CHANGE} | LAST_BITS
    return hashlib.sha256(to_json(training.model_dump(mode="json", exclude=outside))).hexdigest()[:16]


def recipe_hash(settings: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> str:
    """12 hex digits, the name of a tiny model, over everything that shapes it: settings, a sample prompt, and the number of
    worked examples."""
    from entente.game.board import Board  # imported here because it loads the game engine

    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    sample = rules_text(prompts) + board_text(board, legal.power, prompts) + power_text(legal, board, prompts)
    sample += str(prompts.examples or "")
    return hashlib.sha256(f"{RECIPE_VERSION}|{settings.model_dump_json()}|{sample}".encode()).hexdigest()[:12]


def find_tiny(root: Path, recipe: TinyModelSettings, prompts: PromptSettings = DEFAULT_PROMPTS) -> Path | None:
    """Folder of the model of `recipe` for these prompts; None if it does not exist."""
    folder = root / f"tiny-{recipe_hash(recipe, prompts)}"
    return folder if (folder / "recipe.json").is_file() else None


def longest_sequence(prompts: PromptSettings) -> int:
    """Longest prompt plus completion of a tiny model, tokens. Prompts that list every legal order on a line are several times
    longer; the last orders of all powers are up to 850 characters."""
    listed = 4096 if prompts.legal_orders == "lines" else 1024
    return listed + 512 * prompts.last_orders + prompts.thinking_tokens
