"""Attention for a GPU, as far as a CPU can tell: everything but the kernels themselves."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.varlen import varlen_attn

import training.layout
from tests.training.batches import three_levels
from tests.training.test_packed_forward import apart, base, policy_of, step
from training import packed_attention_gpu
from training.packed_attention import DenseAttention
from training.packed_attention_gpu import FlexAttention, VarlenAttention
from training.packed_forward import attention_kinds

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FORESTS = {
    "a few branches": {"tokens": 1024, "splits": 0.01},
    "many branches": {"tokens": 700, "splits": 0.1},
    "one token": {"tokens": 1},
}


def forest(tokens: int, *, splits: float = 0.02, seed: int = 0) -> Any:
    """A forest of `tokens` tokens: each continues the token before it, or with probability `splits` another token on its path, or
    begins a tree. It has the fields of a micro-batch that attention needs."""
    dice = np.random.default_rng(seed)
    parents, trail = np.full(tokens, -1), []
    for token in range(tokens):
        if dice.random() < splits:
            del trail[int((len(trail) + 1) * dice.random() ** 0.3) :]  # most often near the end, so that paths are long
        parents[token] = trail[-1] if trail else -1
        trail.append(token)
    leaves, positions = np.arange(1, tokens + 1), np.zeros(tokens, np.int64)
    for token in reversed(range(tokens)):
        if parents[token] >= 0:
            leaves[parents[token]] = max(leaves[parents[token]], leaves[token])
    for token in range(tokens):
        positions[token] = positions[parents[token]] + 1 if parents[token] >= 0 else 0
    follows = (parents[1:] == np.arange(tokens - 1)) & (leaves[1:] == leaves[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    return SimpleNamespace(
        input_ids=np.zeros(tokens, np.int64),
        positions=positions,
        segment_starts=np.append(starts, tokens),
        segment_leaves=leaves[starts],
        leaves=leaves,
        parents=parents,
    )


def queries(tokens: int, heads: int = 4, key_heads: int = 2, width: int = 16, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Query, key and value, laid out as a model has them."""
    dice = torch.Generator().manual_seed(2)
    return [
        torch.randn(1, tokens, count, width, generator=dice, dtype=dtype).transpose(1, 2)
        for count in (heads, key_heads, key_heads)
    ]


# -- flex ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", FORESTS.values(), ids=FORESTS.keys())
@pytest.mark.parametrize("window", [None, 40])
def test_the_block_mask_is_the_one_that_torch_makes_from_all_pairs_of_tokens(shape: dict[str, Any], window: int | None):
    made = forest(**shape)
    found = FlexAttention(made, CPU).mask(window)
    oracle = create_block_mask(found.mask_mod, None, None, *found.seq_lengths, device="cpu")
    assert found.seq_lengths == oracle.seq_lengths and found.BLOCK_SIZE == oracle.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        for kind in ("num_blocks", "indices"):
            one, other = getattr(found, f"{name}_{kind}"), getattr(oracle, f"{name}_{kind}")
            assert torch.equal(one, other) and one.dtype == other.dtype, f"{name}_{kind}"


# -- varlen ----------------------------------------------------------------------------------------------------------------


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch documents for `varlen_attn` with these arguments, one sequence at a time."""
    assert window_size == (-1, 0) and enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and all(rows.is_contiguous() for rows in (query, key, value))
    sizes_q, sizes_k = np.diff(cu_seq_q.numpy()), np.diff(cu_seq_k.numpy())
    assert (sizes_q.max(), sizes_k.max()) == (max_q, max_k) and cu_seq_k[-1] == len(key) and cu_seq_q[-1] == len(query)
    key, value = (rows.repeat_interleave(query.shape[1] // key.shape[1], 1) for rows in (key, value))
    found = []
    sequences = zip(query.split(sizes_q.tolist()), key.split(sizes_k.tolist()), value.split(sizes_k.tolist()), strict=True)
    for asked, keys, values in sequences:
        behind = len(keys) - len(asked) + torch.arange(len(asked))[:, None] < torch.arange(len(keys))[None, :]
        weights = torch.einsum("qhw,khw->hqk", asked, keys).mul(scale).masked_fill(behind, float("-inf")).softmax(-1)
        found.append(torch.einsum("hqk,khw->qhw", weights, values))
    return torch.cat(found)


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of flash attention instead of its kernel."""
    monkeypatch.setattr(packed_attention_gpu, "flash", naive)


@pytest.mark.usefixtures("no_kernel")
def test_variable_length_attention_and_its_gradient_are_those_of_the_dense_mask():
    made = forest(150, splits=0.1, seed=5)
    found = []
    for attention in (DenseAttention(made, CPU), VarlenAttention(made, CPU)):
        given = [rows.clone().requires_grad_() for rows in queries(150, dtype=torch.float64)]
        attended = attention(given[0], given[1], given[2], 0.25, 1000)
        (attended * torch.linspace(-1, 1, attended.numel(), dtype=torch.float64).view(attended.shape)).sum().backward()
        found.append([attended.detach(), *(rows.grad for rows in given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
    assert len(made.segment_leaves) > 10, "the forest is one path, so this test says nothing"


@pytest.mark.usefixtures("no_kernel")
def test_a_step_with_variable_length_attention_has_the_padded_loss_and_gradient():
    policy, batch = policy_of(base()), three_levels(positions=1, forks=2)
    padded, oracle, _ = step(policy, batch, layout="padded")
    policy.attention = "varlen"
    policy.recompute(True)
    packed, gradient, updater = step(policy, batch)
    assert updater.layout.packed and policy.attention == "varlen", updater.layout.fallback
    assert abs(packed - padded) <= 1e-6 and apart(gradient, oracle) <= 1e-5


@pytest.mark.usefixtures("no_kernel")
def test_nothing_that_is_gathered_is_kept_for_the_backward():
    made = forest(150, splits=0.1, seed=5)
    call, kept = VarlenAttention(made, CPU), []
    assert len(call.keys) > 2 * 150
    given = [rows.clone().requires_grad_() for rows in queries(150)]
    with torch.autograd.graph.saved_tensors_hooks(lambda rows: kept.append(rows.numel()) or rows, lambda rows: rows):
        call(given[0], given[1], given[2], 0.25)
    assert sorted(kept) == sorted(rows.numel() for rows in given)


def test_the_installed_torch_takes_our_arguments_and_knows_the_gradient():
    """On tensors without memory: the kernel runs on CUDA only, but its signature and autograd formula are registered here."""
    assert {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)
    made, nothing = forest(150), torch.device("meta")
    given = [rows.to(nothing, torch.bfloat16).requires_grad_() for rows in queries(150)]
    attended = VarlenAttention(made, nothing)(given[0], given[1], given[2], 0.25)
    attended.sum().backward()
    assert attended.shape == (1, 150, 4, 16) and all(rows.grad is not None and rows.grad.shape == rows.shape for rows in given)


def test_a_window_that_hides_something_is_refused_by_variable_length_attention():
    made, (query, key, value) = forest(60, splits=0.0), queries(60)
    with pytest.raises(NotImplementedError, match="no sliding window"):
        VarlenAttention(made, CPU)(query, key, value, 0.25, 59)


# -- the choice ------------------------------------------------------------------------------------------------------------


def test_on_a_card_variable_length_comes_first_where_flash_attention_supports_the_model():
    def kinds(kind: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **more: Any) -> tuple[str, ...]:
        return attention_kinds("auto", CUDA, base(kind, **more).to(dtype))

    assert kinds() == attention_kinds("auto", CUDA) == ("varlen", "flex", "dense")
    assert kinds(dtype=torch.float32) == kinds(head_dim=320) == ("flex", "dense")
    assert kinds("mistral", sliding_window=6) == ("flex", "dense") and kinds("mistral", sliding_window=None)[0] == "varlen"
    assert kinds(use_sliding_window=True, sliding_window=6, max_window_layers=1) == ("flex", "dense")
    assert attention_kinds("flex", CUDA) == ("flex",) and attention_kinds("auto", CPU) == ("ranges", "dense")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_kinds_without_a_kernel_here_give_way_in_turn_and_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    policy, batch = policy_of(base()), three_levels()
    _, oracle, _ = step(policy, batch, layout="padded")
    monkeypatch.setattr(training.layout, "attention_kinds", lambda *_: ("varlen", "flex", "dense"))
    _, gradient, updater = step(policy, batch)
    assert updater.layout.packed and policy.attention == "dense" and apart(gradient, oracle) <= 1e-5
    assert [kind for kind in ("varlen", "flex", "dense") if f"'{kind}' is not used" in caplog.text] == ["varlen", "flex"]
