"""The least seconds of a step: the arithmetic of its tokens at the matrix rate of this machine.

    floor = [ u (4 B + 6 A) + b 4 H  +  p 2 B  +  d (2 B + 2 H)  +  f 2 B ] / rate

u   unique trained tokens: a forward and a backward to the activations through the base (2 B each), and the adapter's forward,
    backward to the activations and backward to its weights (2 A each)
b   branching trained tokens, whose logits are computed: a forward and a backward through the head
p   prompt tokens that were not in the prefix cache; d drawn and f forced completion tokens. Only drawn ones need logits.
B   weights of the linear layers; H of the head; A of the adapter

The rate is that of float32 matrix products of the model's own shape on one thread, times the cores. Attention scores, norms, the
optimiser, the base of a divergence, games and files are left out, so no program reaches the floor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.outcome import timed
from decoding.architectures import read_architecture
from decoding.codec import Codec
from pipeline.threads import usable_cores
from training.settings import TrainingSettings

_ROWS, _PRODUCTS, _ROUNDS = 512, 40, 7
"""Rows of the measured product, products of a round, and rounds, of which the best counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Numbers of weights of a model and its adapter."""

    base: int
    """B: linear layers."""
    head: int
    """H: vocabulary times hidden size."""
    adapter: int
    """A."""


def weights_of(model: Path, training: TrainingSettings) -> Weights:
    """The weights of the model in folder `model` with the adapter of `training`."""
    sizes = read_architecture(model)
    return Weights(
        base=sizes.linear_parameters,
        head=Codec(model).vocabulary_size * sizes.hidden,
        adapter=sizes.lora_parameters(training.lora_rank, training.lora_targets),
    )


TOKENS = (
    "train/unique_tokens",
    "train/branching_tokens",
    "rollout/prompt_tokens",
    "rollout/cached_tokens",
    "rollout/completion_tokens",
    "rollout/forced_share",
)
"""Metrics of a step from which its floor follows."""


def floor_s(step: Mapping[str, float], weights: Weights, flops_per_s: float) -> float:
    """Least seconds of a step.

    Args:
        step: TOKENS of the step.
        flops_per_s: matrix rate of the machine, floating point operations a second.
    """
    base, head = weights.base, weights.head
    trained = step["train/unique_tokens"] * (4 * base + 6 * weights.adapter) + step["train/branching_tokens"] * 4 * head
    drawn = step["rollout/completion_tokens"] * (1 - step["rollout/forced_share"])
    computed = step["rollout/prompt_tokens"] - step["rollout/cached_tokens"] + step["rollout/completion_tokens"]
    return (trained + computed * 2 * base + drawn * 2 * head) / flops_per_s


def matrix_flops_per_s(model: Path) -> float:
    """Floating point operations a second of float32 products of the model's shape: one thread, best round, times the cores."""
    import torch

    sizes = read_architecture(model)
    left, right = torch.rand(_ROWS, sizes.hidden), torch.rand(sizes.hidden, sizes.inner)

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.matmul(left, right)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        products()  # warms up
        best = min(timed(products)[0] for _ in range(_ROUNDS))
    finally:
        torch.set_num_threads(before)
    return 2.0 * left.numel() * sizes.inner * _PRODUCTS / best * usable_cores()
