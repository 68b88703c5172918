"""The fused layers compute what those of peft and transformers do, forward and backward, and leave other formulas alone."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from entente.training.fused_layers import fuse_layers


class Small(nn.Module):
    def __init__(self, norm: type[nn.Module], *, bias: bool) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = norm(12), nn.Linear(12, 20, bias=bias), nn.Linear(20, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(torch.tanh(self.inner(self.norm(hidden))))


def pair(dtype: torch.dtype, norm: type[nn.Module] = Qwen3RMSNorm, *, bias: bool = True) -> tuple[Any, Any]:
    """The same model with an adapter of rank 3 that changes it: as peft runs it, and fused."""
    torch.manual_seed(5)
    small = Small(norm, bias=bias)
    with torch.no_grad():
        small.norm.weight.copy_(torch.randn(12))
    config = LoraConfig(r=3, lora_alpha=5.0, target_modules=["inner", "outer"])  # type: ignore[arg-type]
    model: Any = get_peft_model(small.to(dtype), config, autocast_adapter_dtype=True)  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn_like(weight))
    fused = deepcopy(model)
    fuse_layers(fused)
    return model.eval(), fused.eval()


def results(model: Any, dtype: torch.dtype, *, first: bool = False) -> dict[str, Tensor]:
    """Output and gradients; with `first` the input has none, as a layer right above frozen ones."""
    torch.manual_seed(6)
    given = torch.randn(2, 7, 12).bfloat16().to(dtype).requires_grad_(not first)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = model(given)
    model.zero_grad()
    (output.float() * torch.linspace(-1, 2, output.numel()).view(output.shape)).sum().backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    return {"output": output.detach(), **found} | ({} if first else {"given": given.grad})


def distance(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_are_those_of_peft_and_transformers(bias: bool, first: bool):
    theirs, ours = (results(model, torch.float32, first=first) for model in pair(torch.float32, bias=bias))
    assert theirs.keys() == ours.keys() and len(ours) == (5 if first else 6)
    assert all(distance(ours[name], theirs[name]) < 1e-6 for name in ours)


def test_in_bfloat16_they_are_no_further_from_the_exact_ones():
    """`exact`: the same rounded weights in float32."""
    theirs, ours = (results(model, torch.bfloat16) for model in pair(torch.bfloat16))
    exact = results(pair(torch.bfloat16)[0].float(), torch.float32)
    assert all(ours[name].dtype == theirs[name].dtype for name in exact)
    apart = [(distance(ours[name], exact[name]), distance(theirs[name], exact[name])) for name in exact]
    assert max(one for one, _ in apart) < 0.1 and sum(one for one, _ in apart) < 1.1 * sum(other for _, other in apart), apart


def test_a_copy_of_fused_layers_computes_with_its_own_weights():
    _, fused = pair(torch.float32)
    given, before = torch.randn(1, 3, 12), deepcopy(fused)
    with torch.no_grad():
        for weight in fused.parameters():
            weight.zero_()
    assert torch.equal(fused(given), given) and not torch.equal(before(given), given)


def test_a_disabled_adapter_changes_nothing():
    model, fused = pair(torch.float32)
    given = torch.randn(1, 3, 12)
    with model.disable_adapter(), fused.disable_adapter():
        assert torch.equal(model(given), fused(given))
    assert not torch.allclose(fused(given), fused.base_model.model.norm(given))


@pytest.mark.parametrize(("norm", "is_fused"), [(LlamaRMSNorm, True), (Qwen3RMSNorm, True), (GemmaRMSNorm, False)])
def test_a_norm_of_another_formula_keeps_its_own_forward(norm: type[nn.Module], is_fused: bool):
    model, fused = pair(torch.float32, norm)
    assert (type(fused.base_model.model.norm) is not norm) is is_fused
    theirs, ours = results(model, torch.float32), results(fused, torch.float32)
    assert all(distance(ours[name], theirs[name]) < 1e-6 for name in ours)
