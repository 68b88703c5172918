"""Merged weights are what peft itself would merge."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inference.merge import load_base, merge_adapter
from telemetry.errors import DataError
from tests.families import save_family


def test_merged_weights_equal_those_that_peft_merges(model: Path, make_adapter, tmp_path: Path):
    adapter = make_adapter(seed=3, scale=0.2)
    merge_adapter(load_base(model), adapter, tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    oracle = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter)
    ).merge_and_unload()
    changed = 0
    base = load_base(model)
    for name, weight in oracle.state_dict().items():
        if name in ours:
            assert torch.allclose(ours[name], weight, atol=1e-6), name
            changed += int(not torch.equal(ours[name], base[name]))
    assert changed == 7 * json.loads((model / "config.json").read_text())["num_hidden_layers"]


@pytest.mark.parametrize(("family", "parts"), [("qwen2", ["self_attn", "mlp"]), ("qwen3_moe", ["self_attn"])])
def test_only_parts_that_an_adapter_may_change_are_loaded_again_but_whole(tmp_path: Path, family: str, parts: list[str]):
    """An engine that got the queries alone would lose keys, values and biases of their fused layer."""
    stored = load_file(save_family(family, tmp_path) / "model.safetensors")
    loaded = load_base(tmp_path)
    assert set(loaded) == {name for name in stored if name.split(".")[3:4] and name.split(".")[3] in parts}
    assert all(torch.equal(loaded[name], stored[name]) for name in loaded)


def test_an_adapter_of_another_base_is_refused_by_name(model: Path, make_adapter, tmp_path: Path):
    adapter = make_adapter(seed=4, scale=0.2)
    base = {name: weight[:-1] if name.endswith("0.mlp.up_proj.weight") else weight for name, weight in load_base(model).items()}
    with pytest.raises(DataError, match=r"does not fit this base model at model.layers.0.mlp.up_proj"):
        merge_adapter(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_refused(model: Path, make_adapter, tmp_path: Path, file: str):
    adapter = make_adapter(seed=5, scale=0.2)
    (adapter / file).write_bytes((adapter / file).read_bytes()[:20])
    with pytest.raises(DataError, match="cannot be read"):
        merge_adapter(load_base(model), adapter, tmp_path / "merged")
