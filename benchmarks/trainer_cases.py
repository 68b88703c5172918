"""Random models and random batches for the trainer benchmarks, like those of rollouts.

Forks of a prompt sample from one tree of legal tokens: a third branch, with 3.4 ids on average, the others are forced."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from storage.gather import Batch

BRANCHING_SHARE = 1 / 3
"""Proportion of branching completion tokens: 9.7 of 28.6 in random play."""
LEGAL_MEAN = 3.4
LEGAL_MOST = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch: positions x powers x forks decisions."""

    positions: int
    forks: int
    """Decisions per prompt and advantage group."""
    powers: int = 1
    """Prompts per position."""
    rules: int = 0
    """Prompt tokens common to all positions."""
    board: int = 0
    """Prompt tokens common to the powers of a position."""
    own: int = 440
    """Prompt tokens common only to the forks of a power."""
    completion: int = 24
    spread: float = 0.0
    """Relative half-width of the uniform distribution of the lengths of `own` and `completion`."""

    @property
    def rows(self) -> int:
        return self.positions * self.powers * self.forks


CASES = {
    "g6": Case(positions=2, forks=6),
    "g16": Case(positions=1, forks=16),
    "masked_32k": Case(positions=2, forks=6),
    "trie": Case(positions=1, powers=7, forks=6, rules=150, board=230, own=60),
}


def made_up_batch(case: Case, *, vocabulary: int, seed: int = 0) -> Batch:
    """A batch of `case`, determined by the seed; the rows of a group are consecutive."""
    rng = np.random.default_rng(seed)
    rules = rng.integers(0, vocabulary, case.rules)
    prompts, completions, legal = [], [], []
    for _ in range(case.positions):
        board = rng.integers(0, vocabulary, case.board)
        for _ in range(case.powers):
            prompt = np.concatenate([rules, board, rng.integers(0, vocabulary, _about(rng, case.own, case.spread))])
            tree = _LegalTree(rng, vocabulary)
            for _ in range(case.forks):
                ids, sets = tree.walk(_about(rng, case.completion, case.spread))
                prompts.append(prompt)
                completions.append(ids)
                legal.append(sets)
    sizes = [len(ids) for sets in legal for ids in sets]
    logprobs = [-np.log(size) + (0.1 * rng.standard_normal() if size > 1 else 0.0) for size in sizes]
    return Batch(
        decision_ids=np.arange(case.rows, dtype=np.int64),
        input_ids=np.concatenate([part for pair in zip(prompts, completions, strict=True) for part in pair]).astype(np.int32),
        input_offsets=offsets_of([len(prompt) + len(ids) for prompt, ids in zip(prompts, completions, strict=True)]),
        prompt_lens=np.array([len(prompt) for prompt in prompts], np.int32),
        behaviour_logprobs=np.minimum(np.array(logprobs, np.float32), 0.0),
        completion_offsets=offsets_of([len(ids) for ids in completions]),
        legal_ids=np.concatenate([ids for sets in legal for ids in sets]).astype(np.int32),
        legal_offsets=offsets_of(sizes),
        temperatures=np.ones(case.rows, np.float32),
        returns=rng.standard_normal(case.rows),
        advantage_groups=np.repeat(np.arange(case.positions * case.powers, dtype=np.int32), case.forks),
        policy_versions=np.zeros(case.rows, np.int32),
    )


class _LegalTree:
    def __init__(self, rng: np.random.Generator, vocabulary: int) -> None:
        self._rng, self._vocabulary = rng, vocabulary
        self._sets: dict[tuple[int, ...], np.ndarray] = {}

    def walk(self, length: int) -> tuple[list[int], list[np.ndarray]]:
        sampled: list[int] = []
        sets = []
        for _ in range(length):
            allowed = self._allowed(tuple(sampled))
            sets.append(allowed)
            sampled.append(int(self._rng.choice(allowed)))
        return sampled, sets

    def _allowed(self, beginning: tuple[int, ...]) -> np.ndarray:
        if beginning not in self._sets:
            size = 1
            if self._rng.random() < BRANCHING_SHARE:
                # At least 2, with the measured mean; the 95th percentile is then 7, as measured.
                size = min(1 + int(self._rng.geometric(1 / (LEGAL_MEAN - 1))), LEGAL_MOST)
            self._sets[beginning] = np.sort(self._rng.choice(self._vocabulary, size, replace=False))
        return self._sets[beginning]


def _about(rng: np.random.Generator, length: int, spread: float) -> int:
    return round(length * (1 + spread * (2 * rng.random() - 1))) if spread else length


def offsets_of(lengths: Sequence[int]) -> np.ndarray:
    """int64 [len(lengths) + 1]: start of each row in a flat array, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


# -- models ----------------------------------------------------------------------------------------------------------------


TINY = Qwen3Config(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
"""The model of all figures on a CPU."""
TINY_32K = Qwen3Config.from_dict(TINY.to_dict() | {"vocab_size": 32_768})


def model_of(config: PretrainedConfig) -> Any:
    """A model with random weights (standard deviation 0.02), determined by its config. The head's are smaller, so that legal
    tokens are about equally probable and the ratio to `made_up_batch`'s behaviour logprobs is near 1, as in a run."""
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)  # a policy changes it
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                weight.normal_(std=0.02 if "head" not in name else 0.005, generator=generator)
    return model.eval()


def stir_adapter(parameters: Sequence[torch.nn.Parameter], seed: int = 1) -> None:
    """Add noise to a new adapter: its B is zero, and with it the gradient of A."""
    generator = torch.Generator(device=parameters[0].device).manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.empty_like(parameter).normal_(std=0.01, generator=generator))
