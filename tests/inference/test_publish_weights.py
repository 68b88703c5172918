"""Merged weights are what peft itself would merge."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from entente.decoding.weight_files import WEIGHTS
from entente.inference.publish_weights import add_adapter, publish_weights
from entente.telemetry.errors import DataError


def test_merged_weights_equal_those_that_peft_merges(model: Path, make_adapter):
    adapter, base = make_adapter(seed=3, scale=0.2), load_file(model / WEIGHTS)
    ours, _ = add_adapter(base, adapter)
    oracle = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter)
    ).merge_and_unload()
    changed = 0
    for name, weight in oracle.state_dict().items():
        if name in ours:
            assert torch.allclose(ours[name], weight, atol=1e-6), name
            changed += int(not torch.equal(ours[name], base[name]))
    assert changed == 7 * json.loads((model / "config.json").read_text())["num_hidden_layers"]


def test_merged_weights_are_as_open_to_others_as_any_new_file(model: Path, make_adapter, tmp_path: Path):
    assert publish_weights(model, make_adapter(seed=3, scale=0.2), tmp_path) == "float32"
    (tmp_path / "card").touch()
    assert (tmp_path / WEIGHTS).stat().st_mode == (tmp_path / "card").stat().st_mode


def test_weights_of_several_formats_have_the_dtype_of_the_base(model: Path, tmp_path: Path):
    base, target = shutil.copytree(model, tmp_path / "base"), tmp_path / "target"
    target.mkdir()
    weights = load_file(base / WEIGHTS)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.bfloat16)
    save_file(weights, base / WEIGHTS, metadata={"format": "pt"})
    assert publish_weights(base, None, target) == "float32"


def test_rounding_swallows_small_updates_in_bfloat16_and_none_in_float32(model: Path, make_adapter):
    adapter, base = make_adapter(seed=4, scale=2e-3), load_file(model / WEIGHTS)
    assert add_adapter(base, adapter)[1] < 1e-3
    assert add_adapter({name: weight.to(torch.bfloat16) for name, weight in base.items()}, adapter)[1] > 0.5
    assert add_adapter(base, make_adapter(seed=5, scale=0.0))[1] == 0.0


def test_an_adapter_of_another_base_is_refused_by_name(model: Path, make_adapter):
    whole = load_file(model / WEIGHTS)
    base = {name: weight[:-1] if name.endswith("0.mlp.up_proj.weight") else weight for name, weight in whole.items()}
    with pytest.raises(DataError, match=r"does not fit this base model at model.layers.0.mlp.up_proj"):
        add_adapter(base, make_adapter(seed=4, scale=0.2))
