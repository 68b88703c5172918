"""No adapter that could hurt an engine passes, each refusal names the file and the cure, and a good one passes as it is."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from entente.evaluation.adapter_folders import check_weights
from entente.inference.adapter_check import _PLAIN_OPTIONS, check_adapter
from entente.records.policy_version import PolicyVersion, version_in
from entente.telemetry.errors import DataError
from storage.adapters import publish_adapter
from storage.runs import RunPaths
from tests.chat_models import set_config
from tests.families import save_family

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def good(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 8 as the trainer writes it."""
    from entente.training.policy import Policy
    from entente.training.settings import TrainingSettings

    folder = tmp_path_factory.mktemp("good") / "adapter"
    Policy(model, TrainingSettings(lora_rank=8, lora_alpha=16)).save_adapter(folder)
    return folder


@pytest.fixture
def adapter(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "adapter"))


def change_config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: set_config(folder, CONFIG, **fields)


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return rewrite


Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

SPOILT = {
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS),
    "a config that is no JSON": (lambda folder: (folder / CONFIG).write_text("{"), CONFIG),
    "another kind of adapter": (change_config(peft_type="IA3"), "only LORA"),
    "a rank of zero": (change_config(r=0), "must be positive numbers"),
    "DoRA": (change_config(use_dora=True), "use_dora"),
    "a rank of its own for a module": (change_config(rank_pattern={"q_proj": 4}), "rank_pattern"),
    "a config of another rank than the weights": (change_config(r=4), r"has shape .* rank 4"),
    "cut weights": (
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100]),
        "not a complete safetensors",
    ),
    "no tensors": (change_weights(lambda tensors: tensors.clear()), "lacks any weights"),
    "half a pair": (change_weights(lambda tensors: tensors.pop(Q_A)), "half of the pair .*layers.0.self_attn.q_proj"),
    "a module that is not there": (
        change_weights(lambda tensors: tensors.update({Q_A.replace("q_proj", "qkv_proj"): torch.zeros(8, 64)})),
        "qkv_proj.* none of the layers",
    ),
    "weights of a wider base": (change_weights(lambda tensors: tensors.update({Q_A: torch.zeros(8, 65)})), r"\(8, 64\)"),
    "a value that is no number": (
        change_weights(lambda tensors: tensors[Q_A][0].fill_(float("nan"))),
        "are not finite",
    ),
}


@pytest.mark.parametrize("spoil, sentence", SPOILT.values(), ids=SPOILT.keys())
def test_a_spoilt_adapter_is_refused_by_name(adapter, model, spoil, sentence):
    spoil(adapter)
    try:
        policy = version_in(adapter, 1)  # the hash is right: what is wrong was published so
    except DataError:
        policy = PolicyVersion(version=1, adapter_hash="unknown", adapter=adapter)
    with pytest.raises(DataError, match=sentence) as refusal:
        check_adapter(policy, model, 64)
    assert str(adapter) in str(refusal.value) and "\n" not in str(refusal.value)


STARTS = (True, False, *re.findall(r"'([a-z_]+)(?=['\\[])", str(LoraConfig.__annotations__["init_lora_weights"])), "lora_ga")
"""What the installed peft takes as `init_lora_weights`."""
NEED_DATA = ("corda", "lora_ga", "loftq")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.filterwarnings("ignore::UserWarning")  # that EVA was given no data
@pytest.mark.parametrize("start", STARTS, ids=str)
def test_an_adapter_is_served_only_if_peft_adds_it_to_the_same_base(llama: Path, tmp_path: Path, start: bool | str):
    """Oracle: the weight that peft itself computes with, once it has loaded the adapter on a fresh base."""
    value = f"{start}4" if str(start).endswith("_") else start
    own: Any = {} if start in NEED_DATA else {"init_lora_weights": value}
    made = LoraConfig(r=8, target_modules=["q_proj"], **own)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(llama), made)
    adapted.save_pretrained(str(tmp_path))
    change_config(init_lora_weights=value)(tmp_path)
    name = "model.layers.1.self_attn.q_proj"
    before = load_file(llama / "model.safetensors")[f"{name}.weight"]
    same = False
    if start not in NEED_DATA:
        layer: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), str(tmp_path)).base_model.model
        same = torch.equal(layer.get_submodule(name).base_layer.weight, before)
    if same:
        assert check_adapter(version_in(tmp_path, 1), llama, 8).scale == 1.0
    else:
        with pytest.raises(DataError, match=f"init_lora_weights '{value}'.*path_initial_model_for_weight_conversion"):
            check_adapter(version_in(tmp_path, 1), llama, 8)


def test_peft_knows_starts_of_both_kinds():
    assert {"pissa", "pissa_niter_", "olora", "gaussian", "eva"} < set(STARTS) and len(STARTS) >= 11


@pytest.mark.parametrize("option", [*sorted({field.name for field in fields(LoraConfig)} - _PLAIN_OPTIONS), "of_a_later_peft"])
def test_an_option_that_may_change_more_than_a_product_is_refused_by_name(adapter, model, option):
    assert check_adapter(version_in(adapter, 1), model, 8)
    change_config(**{option: {"on": True}})(adapter)
    with pytest.raises(DataError, match=f"uses {option}"):
        check_adapter(version_in(adapter, 1), model, 8)


def test_options_that_choose_layers_or_train_pass(adapter, model):
    change_config(
        layers_to_transform=[0, 1], layers_pattern="layers", exclude_modules="x", lora_dropout=0.1, eva_config={"rho": 2}
    )(adapter)
    assert check_adapter(version_in(adapter, 1), model, 8).scale == 2.0
    change_config(use_rslora=True)(adapter)
    assert check_adapter(version_in(adapter, 1), model, 8).scale == pytest.approx(16 / 8**0.5)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_numbers_that_engines_do_not_compute_with_are_refused_by_their_format(adapter, model, dtype):
    change_weights(lambda tensors: tensors.update({Q_A: tensors[Q_A].to(dtype)}))(adapter)
    with pytest.raises(DataError, match=f"'{Q_A}' in {str(dtype).removeprefix('torch.')}: save the adapter in float32"):
        check_adapter(version_in(adapter, 1), model, 8)


@pytest.mark.parametrize("code", ["F8_E8M0", "F4"])
def test_a_format_that_torch_has_no_name_for_is_refused_by_it(adapter, model, code):
    header = json.dumps({Q_A: {"dtype": code, "shape": [8, 64], "data_offsets": [0, 512 if code[1] == "8" else 256]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(512 if code[1] == "8" else 256)
    (adapter / WEIGHTS).write_bytes(content)
    with pytest.raises(DataError, match=f"{code}.*save the adapter in float32"):
        check_adapter(version_in(adapter, 1), model, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_floats_are_served(adapter, model, dtype):
    change_weights(lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))(adapter)
    assert check_adapter(version_in(adapter, 1), model, 8).is_zero


def test_an_adapter_that_changes_nothing_is_a_warning(adapter, model, caplog):
    caplog.set_level("INFO")
    check_weights(version_in(adapter, 1), model)
    assert "changes nothing" in caplog.text
    caplog.clear()
    change_weights(lambda tensors: [value.fill_(0.1) for value in tensors.values()])(adapter)
    check_weights(version_in(adapter, 1), model)
    assert not caplog.text


def test_another_hash_than_the_one_told_is_refused_with_both(good, model):
    with pytest.raises(DataError, match=rf"{version_in(good, 1).adapter_hash}, not 0{{32}}"):
        check_adapter(PolicyVersion(version=1, adapter_hash="0" * 32, adapter=good), model, 64)


def test_a_rank_above_the_slots_is_refused_with_both_numbers(good, model):
    policy = version_in(good, 1)
    with pytest.raises(DataError, match="rank 8 but the engine's slots take rank 4"):
        check_adapter(policy, model, 4)
    assert check_adapter(policy, model, 8).scale == 2.0


def test_what_the_trainer_publishes_passes_under_the_hash_that_storage_gives_it(good, model, tmp_path):
    published = publish_adapter(RunPaths(tmp_path / "run"), 3, good)
    facts = check_adapter(published, model, 16)
    assert facts.scale == 2.0 and facts.is_zero  # a fresh adapter changes nothing
    assert len({file.stat().st_mode for file in good.iterdir() if file.suffix != ".md"}) == 1


def test_an_adapter_on_named_layers_changes_these_alone(model, tmp_path):
    from entente.training.policy import Policy
    from entente.training.settings import TrainingSettings

    Policy(model, TrainingSettings(lora_rank=8, lora_targets=("v_proj", "q_proj"))).save_adapter(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["target_modules"] == ["q_proj", "v_proj"]
    assert check_adapter(version_in(tmp_path, 1), model, 8).is_zero


def test_a_base_without_a_config_is_named(good, tmp_path):
    with pytest.raises(DataError, match=r"config\.json"):
        check_adapter(version_in(good, 1), tmp_path, 64)
