"""Settings of learning. docs/training.md has the sources of the defaults."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from telemetry.setting_marks import MAY_CHANGE, STAYS

OUTLIER_LOW, OUTLIER_HIGH = 1e-4, 100.0
"""Tokens whose ratio to the policy that drew them lies outside are left out: a guard against faults, no trust region."""
MISMATCH_ROWS = 64
"""Fresh rows whose log-probabilities trainer and engine must agree on: some 600 tokens, which a first step has."""
CPU_TOKENS = 4096
"""Unique tokens of a micro-batch on a CPU, where a larger one gains nothing."""


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

    lora_rank: Annotated[int, STAYS, Field(ge=1, le=512)] = 16
    """Rank of the adapter on all seven linear modules of a block."""
    lora_alpha: Annotated[float, STAYS, Field(gt=0)] = 32.0
    """Scale numerator: an update counts alpha / rank."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-6
    """AdamW rate, the highest of the schedule; 5e-6 for 7B-class models, about 3e-3 for the tiny one."""
    rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after its warm-up: stay, or fall until decay_steps in a straight line or along a cosine."""
    warm_up_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises to its full value in a straight line; 0: no warm-up."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """Step at which a linear or cosine schedule reaches its end; steps beyond it keep the last rate."""
    final_rate_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the learning rate that is left at the end of a linear or cosine schedule; at 0 the steps beyond teach nothing."""
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
    loss: str = "clipped"
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
    layout: Literal["packed", "padded"] = "packed"
    """How rows lie in a forward: every token path that they share once, or each row whole and padded, which is the slow and plain
    way; packed falls back to it where it does not fit the model or fails its check."""
    micro_batch_rows: Annotated[int, Field(ge=1)] = 32
    """Decisions per padded forward; the loss does not depend on it."""
    token_budget: Annotated[int, Field(ge=0)] = 0
    """Unique tokens of a packed micro-batch; 0: as many as fit, found by one measured forward and backward on a GPU, and a fixed
    number on a CPU. Halved where memory runs out. The loss does not depend on it."""
    recompute: bool = False
    """Compute activations again on the way back instead of keeping them: a third more work for a fraction of the memory."""
    compile: bool = False
    """Compile the model's blocks with torch.compile; on a CPU the first step then takes half a minute and gains little."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the frozen base; the adapter is float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes; auto takes a GPU if there is one."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share the advantage groups of each update, each with the whole model: on CUDA a GPU each, all on this
    machine. The loss does not depend on it."""
    threads: Annotated[int, MAY_CHANGE, Field(ge=0)] = 0
    """CPU threads of the trainer; 0: planned from the cores and from what computes at the same time."""
    answers_within_s: Annotated[float, MAY_CHANGE, Field(ge=0)] = 3600.0
    """Seconds until the trainer's process must have answered, with a step for one; then it counts as hung and is ended, and the
    run goes on from its files when it is resumed. 0: never."""
    simulated_step_s: Annotated[float, Field(ge=0)] = 0.0
    """Above 0: no step trains; it takes so many seconds instead and publishes the weights unchanged, so that all else of a run
    can be measured without a trainer. Rows are chosen, recorded and checked, and versions published, as ever."""
    mismatch_every: Annotated[int, MAY_CHANGE, Field(ge=0)] = 20
    """Steps after which they must agree on such rows again, in a run whose rollouts run ahead: what it trains on was drawn by
    versions before, and shows nothing of the newest. 0: only as a run begins or goes on."""
    mismatch_max: Annotated[float, MAY_CHANGE, Field(gt=0)] = 1e-4
    """Largest difference of a logprob, nats, in float32; more, and the run does not start."""
    mismatch_mean_bf16: Annotated[float, MAY_CHANGE, Field(gt=0)] = 0.03
    """Largest mean difference, nats, where either side computes in bfloat16."""
    mismatch_p99_bf16: Annotated[float, MAY_CHANGE, Field(gt=0)] = 0.15
    """Largest 99th percentile of the difference, nats, where either side computes in bfloat16."""
    keep_checkpoints: Annotated[int, MAY_CHANGE, Field(ge=1)] = 3
    """Newest checkpoints kept; older ones are deleted when a newer one is whole."""
    seed: Annotated[int, STAYS] = 0
    """Seed of the adapter's initial weights."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> "TrainingSettings":
        if self.rate_schedule != "constant" and self.decay_steps <= self.warm_up_steps:
            raise ValueError(
                f"training.decay_steps {self.decay_steps} must lie after training.warm_up_steps {self.warm_up_steps} for the "
                f"{self.rate_schedule} schedule: name the step at which the rate has fallen, usually the run's number of steps"
            )
        return self

    @model_validator(mode="after")
    def _a_weight_to_control(self) -> "TrainingSettings":
        if self.kl_control != "fixed" and not self.kl_weight:
            raise ValueError(
                f"training.kl_control {self.kl_control} has nothing to move while training.kl_weight is 0: "
                "give a weight, such as 0.01"
            )
        return self

    @property
    def carries_state(self) -> bool:
        """Whether a step begins from more than weights: from what moved in the steps before it."""
        moving = self.advantage_baseline == "power" or self.advantage_scale == "running"
        return moving or self.kl_control != "fixed"
