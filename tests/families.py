"""A tiny random model of each family that can be trained, with logits far from flat, and requests beyond its sliding window."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from entente.decoding.legal_table import END, LegalTable
from entente.decoding.open_set import nth_id, set_size
from entente.records.rows import Generation, GenerationRequest

VOCABULARY = 200
WINDOW = 24
"""Tokens that a layer with a sliding window sees."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": None,
    "bos_token_id": None,
}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 20,
            "initializer_range": 0.05,
            "pad_token_id": 0,
        },
    ),
    "llama": (LlamaConfig, {"head_dim": 64}),
    "mistral": (MistralConfig, {"head_dim": 64, "sliding_window": WINDOW}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 64, "tie_word_embeddings": True}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 64, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}),
}
"""Family -> class of its config, and what differs from `_SIZES`."""


def config_of(family: str, **change: Any) -> Any:
    """The config of the tiny model."""
    config, own = CONFIGS[family]
    return config(**{**_SIZES, **own, **change})


def save_family(family: str, folder: Path, **change: Any) -> Path:
    """Write the tiny model into `folder`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family, **change)).save_pretrained(folder)
    return folder


def ladder(steps: int, width: int, forced: int = 3) -> LegalTable:
    """`steps` choices among `width` tokens, each followed by `forced` tokens that must come."""
    nodes: list[dict[int, int]] = []
    for step in range(steps):
        nodes.append(dict.fromkeys(range(10 * step, 10 * step + width), len(nodes) + 1))
        for number in range(forced):
            nodes.append({100 + number: len(nodes) + 1})
    nodes.append({VOCABULARY - 1: END})
    return LegalTable(
        offsets=np.cumsum([0, *map(len, nodes)]).astype(np.int32),
        token_ids=np.array([token for node in nodes for token in sorted(node)], np.int32),
        next_nodes=np.array([node[token] for node in nodes for token in sorted(node)], np.int32),
        longest=len(nodes),
    )


def requests_beyond_the_window(name: str) -> list[GenerationRequest]:
    """Prompts shorter and longer than the window; some share a beginning that is longer than the window."""
    rng, table = np.random.default_rng(7), ladder(steps=5, width=6)
    long, other = (rng.integers(0, VOCABULARY - 1, 3 * WINDOW).tolist() for _ in range(2))
    prompts = [long[: WINDOW // 2], long, [*long, *other[:5]], [*long[: 2 * WINDOW], *other], other]
    return [
        GenerationRequest(request_id=f"{name}/{number}/{seed}", prompt_ids=prompt, table=table, seed=seed)
        for number, prompt in enumerate(prompts)
        for seed in range(2)
    ]


def listed(legal: np.ndarray) -> list[int]:
    """All ids of a legal set."""
    return [nth_id(legal, number) for number in range(set_size(legal))]


def gaps(model: Any, requests: Sequence[GenerationRequest], found: Sequence[Generation]) -> list[float]:
    """Largest difference of each completion's log-probabilities from those of a plain forward of `model` in float32."""
    differences = []
    for each, generation in zip(requests, found, strict=True):
        ids = generation.token_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*each.prompt_ids, *ids]])).logits[0, len(each.prompt_ids) - 1 : -1].double()
        legal, offsets = each.table.legal_sets(ids)
        sets = [listed(legal[offsets[place] : offsets[place + 1]]) for place in range(len(ids))]
        expected = [float(row[token] - torch.logsumexp(row[own], 0)) for row, token, own in zip(logits, ids, sets, strict=True)]
        differences.append(float(np.abs(np.array(expected) - generation.logprobs).max()))
    return differences
