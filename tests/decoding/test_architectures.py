"""Names and shapes of LoRA targets are those of transformers' own modules, and what is unknown is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from entente.decoding.architectures import FAMILIES, architecture_of, read_architecture
from entente.decoding.model_files import max_position
from entente.inference.settings import InferenceSettings
from entente.settings.find_model import check_length
from entente.telemetry.errors import InputError
from tests.families import CONFIGS, config_of


def real_layers(family: str, **change: object) -> dict[str, tuple[int, int]]:
    """Path -> shape of all linear layers inside the blocks of a real model, without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family, **change))
    return {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path.startswith("model.layers.")
    }


def test_every_family_has_a_tiny_model():
    assert sorted(FAMILIES) == sorted(CONFIGS)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("change", [{}, {"num_key_value_heads": 4, "hidden_size": 64}], ids=["tiny", "other sizes"])
def test_the_linear_layers_are_those_of_the_real_model(family: str, change: dict[str, object]):
    found = architecture_of(config_of(family, **change).to_dict(), family)
    assert found.linear_layers() == real_layers(family, **change)
    assert found.lora_parameters(3) == 3 * sum(map(sum, found.linear_layers().values()))


def test_a_config_as_published_with_few_fields_has_the_head_width_of_transformers():
    for family in ("gemma3_text", "qwen3", "llama", "mistral", "qwen2"):
        config, _ = CONFIGS[family]
        sizes = {"hidden_size": 512, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
        given = {"model_type": family, "num_hidden_layers": 1, **sizes}
        real = config(**sizes)
        width = getattr(real, "head_dim", None) or 512 // 4
        assert architecture_of(given, family).head_width == width


def test_targets_are_chosen_by_name_in_the_order_of_the_block():
    found = architecture_of(config_of("qwen3").to_dict(), "m")
    assert found.targets() == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert found.targets(["up_proj", "q_proj", "q_proj"]) == ("q_proj", "up_proj")
    assert set(found.linear_layers(["v_proj"])) == {f"model.layers.{block}.self_attn.v_proj" for block in range(3)}
    with pytest.raises(
        InputError, match=r"training.lora_targets names 'query', .* 'qwen3' offers only q_proj, .*: choose from these"
    ):
        found.targets(["q_proj", "query"])


def test_a_mixture_of_experts_offers_attention_only_and_says_why():
    found = architecture_of(config_of("qwen3_moe").to_dict(), "m")
    assert found.targets() == ("q_proj", "k_proj", "v_proj", "o_proj") and found.has_experts and found.inner == 2 * 48
    with pytest.raises(
        InputError, match=r"'down_proj', .* offers only q_proj, k_proj, v_proj, o_proj \(.* one tensor for all experts"
    ):
        found.targets(["down_proj"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma3"}, r"family 'gemma3', and Entente knows gemma3_text, llama, .*docs/extending.md"),
        ({"final_logit_softcapping": 30.0}, r"uses final_logit_softcapping, which the trainer does not compute"),
        ({"hidden_size": "wide"}, r"does not describe a model of the family 'qwen3'"),
        ({"num_attention_heads": 0}, r"does not describe a model of the family 'qwen3' .*not positive"),
    ],
    ids=["family", "softcapping", "no number", "no heads"],
)
def test_what_is_unknown_is_refused_in_one_sentence(change: dict[str, object], said: str):
    with pytest.raises(InputError, match=said) as refused:
        architecture_of(config_of("qwen3").to_dict() | change, "mine")
    assert "mine" in str(refused.value) and "\n" not in str(refused.value) and refused.value.exit_code == 2


@pytest.mark.parametrize("content", ["[]", "no json", None])
def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=str(tmp_path)):
        read_architecture(tmp_path)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": LONGROPE | {"original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "proportional": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("rope_type", ["default", *ROPE_INIT_FUNCTIONS])
def test_a_sequence_is_rotated_alike_beside_the_longest_neighbour(rope_type: str):
    """The rotary frequencies of transformers are the oracle."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | ROPES[rope_type]
    config = config_of("llama", head_dim=16, max_position_embeddings=256, rope_parameters=rope)
    longest = architecture_of(config.to_dict(), "mine").positions
    assert longest == (64 if rope_type == "longrope" else 256)

    def rotated(neighbour: int) -> torch.Tensor:
        positions = torch.arange(8) if neighbour == 0 else torch.arange(neighbour)
        return LlamaRotaryEmbedding(config)(torch.zeros(1, 1), positions[None])[0][0, :8]

    assert torch.equal(rotated(0), rotated(longest))
    if rope_type in ("dynamic", "longrope"):
        assert not torch.equal(rotated(0), rotated(longest + 1)), "a longer neighbour would change it"


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}},
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64}},
        {"rope_parameters": {"full_attention": LONGROPE | {"original_max_position_embeddings": 64}, "other": ROPES["yarn"]}},
    ],
    ids=["its own key", "the config's key", "an old name", "one kind of layers"],
)
def test_the_first_range_of_longrope_is_read_wherever_it_is_written(config: dict[str, Any], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 256} | config))
    assert max_position(tmp_path) == 64
    with pytest.raises(InputError, match=r"max_model_length 65 exceeds the 64 positions of model 'm' .*longrope.*: lower it"):
        check_length(InferenceSettings(max_model_length=65), max_position(tmp_path), "m")
    check_length(InferenceSettings(max_model_length=64), max_position(tmp_path), "m")
