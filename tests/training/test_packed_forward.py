"""The packed forward says what the padded one says, for every model."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from benchmarks import padded_rows
from benchmarks.padded_rows import TOLERANCES, differences, padded_logprobs, tolerances
from entente.training import packed_attention
from entente.training.masked_logprobs import packed_hidden
from entente.training.micro_batches import plan
from entente.training.packed_attention import RangeAttention
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from entente.training.update import Updater
from tests.training.batches import VOCABULARY, three_levels

KINDS: dict[str, tuple[type, type]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
SETTINGS = TrainingSettings(lora_rank=4, lora_alpha=8, device="cpu")
CPU = torch.device("cpu")


def base(kind: str = "qwen3", *, tied: bool = True, kv_heads: int = 2, **more: Any) -> Any:
    """A small model with random weights."""
    config, model = KINDS[kind]
    torch.manual_seed(0)
    return model(
        config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            pad_token_id=None,
            **more,
        )
    )


def policy_of(model: Any, settings: TrainingSettings = SETTINGS) -> Policy:
    """A policy whose adapter is no longer 0, so that every weight has a gradient."""
    policy = Policy(model, settings)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=rng))
    return policy


def gradient_of(policy: Policy) -> torch.Tensor:
    """All that stands in the parameters, flat."""
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])


def step(policy: Policy, batch: Any, **change: Any) -> tuple[float, torch.Tensor]:
    """Loss and gradient of all rows as training computes them."""
    advantages = (batch.returns - batch.returns.mean()).astype(np.float32)
    found = Updater(policy, SETTINGS.model_copy(update=change)).accumulate(batch, range(len(batch.returns)), advantages)
    return sum(found.losses), gradient_of(policy)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((one - other).norm() / other.norm())


def test_both_forwards_are_the_policy_over_the_legal_set_at_the_temperature_of_the_row():
    """Against the model as transformers has it, one token at a time."""
    policy, batch = policy_of(base()), three_levels()
    (micro,) = plan(batch, range(len(batch.returns)), 4096)
    expected = {}
    with torch.no_grad():
        packed = dict(zip(micro.completion_index.tolist(), policy.masked_logprobs(micro)["chosen"].tolist(), strict=True))
        padded = {}
        for index, logprobs in padded_logprobs(policy, batch, range(len(batch.returns))):
            padded |= dict(zip(index.tolist(), logprobs.tolist(), strict=True))
        for row, place in zip(micro.batch_row, micro.completion_index.tolist(), strict=True):
            ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].astype(np.int64)
            before = int(batch.prompt_lens[row] + place - batch.completion_offsets[row])
            legal = batch.legal_ids[batch.legal_offsets[place] : batch.legal_offsets[place + 1]].tolist()
            logits = policy.model(input_ids=torch.tensor(ids[None, :before])).logits[0, -1, legal].double()
            over = torch.log_softmax(logits / float(batch.temperatures[row]), 0)
            expected[place] = float(over[legal.index(ids[before])])
    assert packed == pytest.approx(expected, abs=1e-5) and padded == pytest.approx(expected, abs=1e-5)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 48}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"kv_heads": 4}),
    "qwen3": ("qwen3", {"tied": False, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "llama": ("llama", {"kv_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "gemma3_text": (
        "gemma3_text",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    ),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "dynamic rotary frequencies": ("llama", {"rope_parameters": DYNAMIC}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
}


@pytest.mark.parametrize(("family", "form"), FORMS.values(), ids=FORMS)
def test_packed_and_padded_have_the_same_loss_and_gradient(family: str, form: dict[str, Any]):
    """Together the rows are longer than any model here reads, so positions count and not places."""
    policy, batch = policy_of(base(family, initializer_range=0.1, **form)), three_levels(positions=6)
    (micro,) = plan(batch, range(len(batch.returns)), 4096)
    assert micro.tokens > policy.row_limits[1] >= micro.positions.max()
    loss, gradient = differences(policy, batch, range(len(batch.returns)))
    assert loss <= 1e-6 and gradient <= 1e-5
    if "sliding_window" in form:
        unbounded = policy_of(base(family, initializer_range=0.1, **{**form, "sliding_window": 100}))
        gradients = [step(each, batch)[1] for each in (policy, unbounded)]
        assert apart(*gradients) > 1e-3, "the window changes nothing, so this test says nothing"


def queries(tokens: int, heads: int = 4, key_heads: int = 2, width: int = 16) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randn(1, tokens, count, width, generator=rng).transpose(1, 2) for count in (heads, key_heads, key_heads)]


@pytest.fixture(params=["cpu", "any device"])
def ranges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges by the operators of torch's CPU kernel, and as they are computed on a GPU."""
    if request.param != "cpu":
        monkeypatch.setattr(packed_attention, "_CpuRanges", packed_attention._Ranges)
        monkeypatch.setitem(packed_attention._CALL_COSTS, "cpu", packed_attention._CALL_COSTS["cuda"])


@pytest.mark.usefixtures("ranges")
@pytest.mark.parametrize("window", [None, 7, 1000])
def test_every_attention_is_that_of_the_mask(window: int | None):
    batch, scale, found = three_levels(positions=6, powers=3, forks=4), 0.25, []
    (micro,) = plan(batch, range(len(batch.returns)), 4096)
    tokens = len(micro.input_ids)
    place = np.arange(tokens)
    near = micro.positions[:, None] - micro.positions[None, :] < (window or tokens)
    rule = torch.from_numpy((place[None, :] <= place[:, None]) & (place[:, None] < micro.leaves[None, :]) & near)

    def of_the_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
        scores = (query @ key.repeat_interleave(2, 1).transpose(2, 3)) * scale
        return (scores.masked_fill(~rule, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)

    for attention in (of_the_mask, RangeAttention(micro, CPU)):
        given = [values.clone().requires_grad_() for values in queries(tokens)]
        attended = attention(given[0], given[1], given[2], scale, window)
        attended.square().sum().backward()
        found.append([attended.detach(), *(values.grad for values in given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_card_gets_fewer_and_longer_ranges_and_no_attention_that_is_built_for_each_shape():
    batch = three_levels(positions=12, powers=7, forks=8)
    (micro,) = plan(batch, range(len(batch.returns)), 8192)
    short, long = (packed_attention._split(micro, packed_attention._CALL_COSTS[device]) for device in ("cpu", "cuda"))
    assert len(long) < len(short) / 4 and long[-1][1] == short[-1][1] == micro.tokens
    torch.backends.cuda.enable_cudnn_sdp(True)
    packed_attention.use_packed_attention(base().config, "ranges")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_last_layer_multiplies_only_tokens_that_are_read():
    batch = three_levels(positions=2, powers=3, forks=4)
    (micro,) = plan(batch, range(len(batch.returns)), 4096)
    causal: Any = policy_of(base()).model.base_model.model
    rows: list[int] = []
    for layer in causal.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda _, given, __: rows.append(given[0].shape[1]))
    packed_hidden(causal, micro)
    assert rows == [micro.tokens] * (len(rows) - 1) + [len(micro.hidden_at)]
    rows.clear()
    causal.model(input_ids=torch.arange(5)[None])  # other forwards are unchanged
    assert set(rows) == {5}


def test_no_gathered_key_is_kept_for_the_backward_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed_attention, "_CpuRanges", packed_attention._Ranges)
    batch, kept = three_levels(positions=3, powers=3, forks=5), []
    (micro,) = plan(batch, range(len(batch.returns)), 4096)
    given = [values.clone().requires_grad_() for values in queries(len(micro.input_ids))]
    with torch.autograd.graph.saved_tensors_hooks(lambda values: kept.append(values.numel()) or values, lambda values: values):
        RangeAttention(micro, CPU)(given[0], given[1], given[2], 0.25)
    assert sum(kept) == sum(values.numel() for values in given)


def test_in_bfloat16_the_two_forwards_are_close():
    settings = SETTINGS.model_copy(update={"dtype": "bfloat16"})
    policy, batch = policy_of(base().to(torch.bfloat16), settings), three_levels()
    rows = range(len(batch.returns))
    found, allowed = differences(policy, batch, rows), tolerances(policy, batch, rows)
    assert all(np.array(found) <= TOLERANCES["cpu", "bfloat16"]) and all(np.array(found) <= allowed)
    assert all(weight.dtype == torch.float32 for weight in policy.parameters())


def test_what_is_allowed_grows_with_what_padded_rows_differ_from_themselves(monkeypatch: pytest.MonkeyPatch):
    """A deep model in bfloat16 rounds more than any fixed bound foresees."""
    policy, batch = policy_of(base().to(torch.bfloat16), SETTINGS.model_copy(update={"dtype": "bfloat16"})), three_levels()
    rows = range(len(batch.returns))
    monkeypatch.setattr(padded_rows, "TOLERANCES", {("cpu", "bfloat16"): (0.0, 0.0)})
    alone = tolerances(policy, batch, rows)
    assert 0 < alone[1] < 0.1, "three times the rounding of a small model"
    monkeypatch.setattr(padded_rows, "TOLERANCES", {("cpu", "bfloat16"): (1.0, alone[1] / 2)})
    assert tolerances(policy, batch, rows) == (1.0, alone[1])
