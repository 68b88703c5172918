"""flex_attention computes what ranges compute. Its gradient needs a card: `entente smoke` compares that."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from entente.telemetry.errors import InputError
from entente.training.flex_attention import FlexAttention
from entente.training.micro_batches import MicroBatch, plan
from entente.training.packed_attention import RangeAttention, use_packed_attention
from entente.training.policy import Policy
from tests.training.batches import batch_of, three_levels
from tests.training.test_packed_forward import CPU, SETTINGS, base, policy_of, queries
from tests.training.test_thought_tokens import thinking_batch

NOT_COMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
BLOCK = 128
LISTS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]


def micro_of(batch: Any) -> MicroBatch:
    (micro,) = plan(batch, range(len(batch.returns)), 8192)
    return micro


def tries(*lengths: int) -> MicroBatch:
    """Prompts of these lengths without a common first token, each with two completions of three unique tokens."""
    rows = [([number, *[9] * (length - 1)], [end, 3, 2, 3]) for number, length in enumerate(lengths) for end in (4, 5)]
    return micro_of(batch_of(rows, groups=[row // 2 for row in range(len(rows))], widest=40))


MICRO_BATCHES = {
    "less than a block": micro_of(three_levels()),
    "a rest after whole blocks": micro_of(three_levels(positions=12, powers=5, forks=6)),
    "several tries": tries(300, 5, 260, 131, 40),
    "whole blocks alone": tries(250, 122),
    "thoughts": micro_of(thinking_batch(positions=8, powers=4, forks=4)),
}


def rule_of(micro: MicroBatch, window: int | None) -> torch.Tensor:
    """bool [T, T]: each token sees itself and its ancestors, found by the positions of the tokens before it."""
    sees = np.zeros((micro.tokens, micro.tokens), bool)
    path: list[int] = []
    for token, position in enumerate(micro.positions.tolist()):
        path[position:] = [token]
        sees[token, path[max(0, position + 1 - (window or micro.tokens)) :]] = True
    return torch.from_numpy(sees)


@pytest.mark.parametrize("micro", MICRO_BATCHES.values(), ids=MICRO_BATCHES)
@pytest.mark.parametrize("window", [None, 7, 10_000])
def test_the_blocks_and_the_rule_give_the_dense_mask(micro: MicroBatch, window: int | None):
    mask: Any = FlexAttention(micro, CPU).block_mask(window)
    token = torch.arange(micro.tokens)
    by_rule = mask.mask_mod(token, token, token[:, None], token[None, :])
    computed, whole = (torch.zeros_like(by_rule) for _ in range(2))
    for seen, number, index in (
        (computed, mask.kv_num_blocks, mask.kv_indices),
        (whole, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row, (count, blocks) in enumerate(zip(number[0, 0], index[0, 0], strict=True)):
            for block in blocks[:count]:
                seen[row * BLOCK : (row + 1) * BLOCK, block * BLOCK : (block + 1) * BLOCK] = True
    assert torch.equal(computed & by_rule | whole, rule_of(micro, window))


@pytest.mark.parametrize("micro", MICRO_BATCHES.values(), ids=MICRO_BATCHES)
def test_the_blocks_are_those_that_torch_finds_in_the_dense_mask(micro: MicroBatch):
    rule, found = rule_of(micro, None), FlexAttention(micro, CPU).block_mask()
    expected = create_block_mask(lambda _b, _h, q, k: rule[q, k], None, None, micro.tokens, micro.tokens, device="cpu")
    assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in LISTS)
    assert found.seq_lengths == expected.seq_lengths and found.BLOCK_SIZE == expected.BLOCK_SIZE


def test_the_micro_batches_have_the_cases_that_their_names_say():
    rests = {name: micro.tokens % BLOCK for name, micro in MICRO_BATCHES.items()}
    assert rests["whole blocks alone"] == 0 and rests["a rest after whole blocks"] and rests["several tries"]
    assert MICRO_BATCHES["less than a block"].tokens < BLOCK and MICRO_BATCHES["thoughts"].has_thought
    assert (MICRO_BATCHES["several tries"].positions == 0).sum() == 5
    masks: list[Any] = [FlexAttention(micro, CPU).block_mask() for micro in MICRO_BATCHES.values()]
    assert any(mask.full_kv_num_blocks.sum() > 0 for mask in masks)


@NOT_COMPILED
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("micro", [MICRO_BATCHES[name] for name in ("several tries", "thoughts")], ids=["tries", "thoughts"])
def test_its_forward_is_that_of_the_ranges(micro: MicroBatch, window: int | None):
    query, key, value = queries(micro.tokens)
    flex, ranges = (attention(micro, CPU)(query, key, value, 0.25, window) for attention in (FlexAttention, RangeAttention))
    torch.testing.assert_close(flex, ranges, atol=1e-6, rtol=0)


@NOT_COMPILED
def test_a_model_attends_as_its_policy_was_told(monkeypatch: pytest.MonkeyPatch):
    policy, micro = policy_of(base()), MICRO_BATCHES["thoughts"]
    calls = []
    attend = FlexAttention.__call__
    monkeypatch.setattr(FlexAttention, "__call__", lambda *given: calls.append(given) or attend(*given))
    found = []
    with torch.no_grad():
        for kind in ("ranges", "flex"):
            use_packed_attention(policy.model.config, kind)
            found.append(policy.masked_logprobs(micro)["chosen"])
    assert len(calls) == policy.model.config.num_hidden_layers
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)


def test_it_is_refused_on_a_cpu_where_torch_has_no_gradient_of_it():
    with pytest.raises(InputError, match=r"'flex', which has a gradient on a GPU only.* set training.attention to 'ranges'"):
        Policy(base(), SETTINGS.model_copy(update={"attention": "flex"}))
