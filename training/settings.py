"""Settings of learning. Sources of the defaults stand in docs/architecture.md."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class TinyModelSettings(BaseModel):
    """Recipe of the model made on the spot; its hash names the folder that caches it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    vocabulary: Annotated[int, Field(ge=300, le=8192)] = 640
    """Tokens of the byte-level BPE; 640 gives most provinces and units a token of their own."""
    hidden: Annotated[int, Field(ge=32, multiple_of=32)] = 128
    """Width of the model; a multiple of 32, because vLLM's CPU attention wants heads of 32."""
    layers: Annotated[int, Field(ge=1)] = 3
    """Transformer blocks."""
    teacher: str = "mover"
    """Scripted player whose orders the base imitates."""
    imitation_steps: Annotated[int, Field(ge=0)] = 150
    """Optimiser steps of imitation; enough to spell orders and prefer moves, far from mastering the game."""
    imitation_positions: Annotated[int, Field(ge=1)] = 5
    """Positions per imitation step, each with the decisions of all its powers (about 7)."""
    imitation_rate: Annotated[float, Field(gt=0)] = 3e-3
    """AdamW learning rate of imitation, with a short warm-up and linear decay."""
    source_games: Annotated[int, Field(ge=1)] = 48
    """Scripted games whose decisions are imitated."""
    seed: int = 0
    """Seed of tokenizer data, initial weights and imitation order."""


class TrainingSettings(BaseModel):
    """The GRPO step: LoRA, loss, optimiser, and what makes a run refuse to start."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Rank of the adapter on all seven linear modules of a block."""
    lora_alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale numerator: an update counts alpha / rank."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-6
    """AdamW rate, constant; 5e-6 for 7B-class models, about 3e-3 for the tiny one."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimiser updates of a step, each on its own share of the step's advantage groups; every decision is used once. More
    learn faster from the same rollouts; the ratio's clip bounds how far the later ones stray from the sampler."""
    max_gradient_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients longer than this are scaled down to it."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios below 1 - clip_low give no gradient where the advantage is negative."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Ratios above 1 + clip_high give no gradient where the advantage is positive (clip-higher, DAPO)."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Bound of ratio times |advantage| for negative advantages (dual-clip PPO)."""
    outlier_low: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Tokens whose ratio is below this are left out."""
    outlier_high: Annotated[float, Field(gt=1)] = 100.0
    """Tokens whose ratio is above this are left out."""
    loss: Literal["clipped", "dppo", "gspo", "sequence_mean"] = "clipped"
    """Policy loss: clipped ratio per token; per token, masked by how far its probability moved (dppo); one ratio for the whole
    decision (gspo); or clipped per token with every decision counting the same. docs/training.md has the formulas."""
    divergence: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """With loss dppo: tokens whose probability moved further than this in the direction of their advantage give no gradient."""
    importance_cap: Annotated[float, Field(ge=0)] = 0.0
    """Above 0: ratios are taken against the policy as the step began, and each token weighs its probability then over the
    sampler's, at most this (2 to 3 is usual); 0: ratios are taken against the sampler directly."""
    advantage_baseline: Literal["group", "power"] = "group"
    """What a return is compared with: the mean of the others in its group, or the moving mean of its power's returns."""
    advantage_scale: Literal["none", "batch", "running"] = "none"
    """What advantages are divided by: nothing, their root mean square in the step, or its moving mean over past steps; never a
    group's own deviation, which would overweight near-ties."""
    moving_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """What a moving mean keeps of itself at each step."""
    entropy_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean entropy over legal sets, which is then rewarded; 0: off."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the exact KL divergence from the base model over legal sets; 0: off, and the base is not asked (which costs half
    a step)."""
    kl_control: Literal["fixed", "warmup", "adaptive"] = "fixed"
    """How the KL weight moves: not at all; from 0 to kl_weight over kl_warmup_steps; or by the divergence measured."""
    kl_warmup_steps: Annotated[int, Field(ge=1)] = 50
    """Steps over which kl_control warmup raises the weight."""
    kl_target: Annotated[float, Field(gt=0)] = 0.05
    """Divergence, nats per branching token, that kl_control adaptive steers to."""
    legal_mass_weight: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean of -log(legal mass) over the probed tokens: keeps the unmasked model on legal orders; 0: off."""
    micro_batch_rows: Annotated[int, Field(ge=1)] = 32
    """Decisions per padded forward; the loss does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the frozen base; the adapter is float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes; auto takes a GPU if there is one."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the trainer; 0: planned from the cores and from what computes at the same time."""
    mismatch_rows: Annotated[int, Field(ge=1)] = 64
    """Fresh rows whose logprobs trainer and engine must agree on before the first step."""
    mismatch_max: Annotated[float, Field(gt=0)] = 1e-4
    """Largest difference of a logprob, nats, in float32; more, and the run does not start."""
    mismatch_mean_bf16: Annotated[float, Field(gt=0)] = 0.03
    """Largest mean difference, nats, where either side computes in bfloat16."""
    mismatch_p99_bf16: Annotated[float, Field(gt=0)] = 0.15
    """Largest 99th percentile of the difference, nats, where either side computes in bfloat16."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    """Newest checkpoints kept; older ones are deleted when a newer one is whole."""
    seed: int = 0
    """Seed of the adapter's initial weights."""
