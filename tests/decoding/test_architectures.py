"""Names and shapes of LoRA targets are those of transformers' own modules, and what is unknown is refused in one sentence."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from entente.decoding.architectures import FAMILIES, architecture_of, read_architecture
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
