"""The memory plan of a training step, against the tensors that autograd keeps. Models are on torch's meta device, so a 7B model
takes no memory; kernels do not run, and what they need beside their results is not counted."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from benchmarks.trainer_cases import Case, made_up_batch
from entente.decoding.architectures import architecture_of
from entente.inference.memory_plan import ModelShape, trainer_gpu_memory
from entente.training.masked_logprobs import masked_logprobs
from entente.training.micro_batches import MicroBatch, plan

RANK = 16
CLASSES = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "gemma3_text": Gemma3TextConfig}
SEVEN_B: dict[str, Any] = {  # Qwen2.5-7B
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
SMALL = SEVEN_B | {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 4096}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "7B": ("qwen2", SEVEN_B),
    "qwen3": ("qwen3", SMALL | {"head_dim": 64}),
    "gemma3_text": ("gemma3_text", SMALL | {"head_dim": 128, "sliding_window": 2048}),
}


def model_without_memory(family: str, sizes: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, ModelShape]:
    """A peft model as `Policy` makes it, and its shape. There is no autocast on this device, so the adapter has the base's dtype;
    its products then have the dtype that autocast gives them."""
    config = CLASSES[family](**sizes, max_position_embeddings=4096)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        architecture = architecture_of(config.to_dict(), family)
        adapter = LoraConfig(r=RANK, target_modules=list(architecture.targets()), task_type="CAUSAL_LM")
        model = get_peft_model(base, adapter, autocast_adapter_dtype=False).eval().to(dtype)
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    fields = {name: getattr(architecture, name) for name in type(architecture).__dataclass_fields__}
    return model, ModelShape(**fields, parameters=frozen, stored=str(dtype).removeprefix("torch."))


def packed(positions: int) -> MicroBatch:
    """A packed micro-batch of six forks for each of so many positions."""
    batch = made_up_batch(Case(positions=positions, forks=6), vocabulary=4096)
    (micro,) = plan(batch, range(len(batch.returns)), 10**6)
    return micro


def kept(model: Any, positions: int) -> tuple[int, int]:
    """Tokens of a packed micro-batch, and bytes of all tensors that its forward keeps for the backward, without weights."""
    micro = packed(positions)
    weights = {StorageWeakRef(weight.untyped_storage()) for weight in model.parameters()}
    found: dict[StorageWeakRef, int] = {}
    alive = []

    def keep(values: torch.Tensor) -> torch.Tensor:
        storage = values.untyped_storage()
        alive.append(storage)
        found[StorageWeakRef(storage)] = storage.nbytes()
        return values

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
        masked_logprobs(model.base_model.model, micro)
    return micro.tokens, sum(size for storage, size in found.items() if storage not in weights)


def kept_per_token(model: Any) -> float:
    """Bytes, from two micro-batches, so that what does not grow with the tokens is left out."""
    (few, small), (many, large) = kept(model, 1), kept(model, 3)
    return (large - small) / (many - few)


def planned_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """What the plan for a GPU counts for a token."""
    one, two = (
        trainer_gpu_memory(shape, rank=RANK, dtype=str(dtype).removeprefix("torch."), tokens=tokens, recompute=False)
        for tokens in (1, 2)
    )
    return two - one


@pytest.mark.parametrize(
    ("shape_name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in SHAPES
        for dtype in (torch.bfloat16, torch.float32)
        if (dtype == torch.bfloat16) != (name == "qwen3")  # the width of a number is the same factor for each family
    ],
)
def test_the_plan_counts_what_autograd_keeps_and_at_most_a_fifth_more(shape_name: str, dtype: torch.dtype):
    family, sizes = SHAPES[shape_name]
    model, shape = model_without_memory(family, sizes, dtype)
    found, planned = kept_per_token(model), planned_per_token(shape, dtype)
    assert found <= planned <= 1.2 * found, f"{found:.0f} bytes a token are kept, {planned} are planned"
    if shape_name == "7B":
        assert 5.4 * 2**20 < found < 5.8 * 2**20, "about 5.6 MiB, as the plan says"
