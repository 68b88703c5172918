"""Which files are a model's weights, and what trainer and engines cannot compute with, without a loaded model."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from entente.decoding import model_files
from entente.decoding.base_identity import base_identity
from entente.decoding.model_files import ask_hub, resolve_model
from entente.decoding.weight_files import stored_format, stored_tensors, usual_mode, weight_files
from entente.inference.engine_cards import engine_dtype
from entente.inference.memory_plan import read_shape
from entente.inference.settings import InferenceSettings
from entente.reports import publish as publishing
from entente.telemetry.errors import InputError

CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 6, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1},
}


def made_model(folder: Path, files: dict[str, list[str]] | None = None, **config: Any) -> Path:
    """A folder with weight files and the tensors in each; several files have an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    files = files or {"model.safetensors": ["model.norm.weight"]}
    for place, (name, tensors) in enumerate(files.items()):
        save_file({tensor: np.full((4, 6), place, np.float32) for tensor in tensors}, folder / name)
    if len(files) > 1:
        places = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


SHARDS = {"model-00001-of-00002.safetensors": ["a.weight", "b.weight"], "model-00002-of-00002.safetensors": ["c.weight"]}
STRAYS: dict[str, Callable[[Path], object]] = {
    "consolidated": lambda folder: save_file({"w": np.ones((9, 9))}, folder / "consolidated.safetensors"),
    "cut consolidated": lambda folder: (folder / "consolidated-00001-of-00002.safetensors").write_bytes(b"cut"),
    "a shard of another save": lambda folder: save_file(
        {"a.weight": np.ones((9, 9))}, folder / "model-00001-of-00009.safetensors"
    ),
    "original": lambda folder: ((folder / "original").mkdir(), (folder / "original" / "model.safetensors").write_bytes(b"x")),
    "pickles": lambda folder: (folder / "pytorch_model.bin").write_bytes(b"\x80" * 99),
    "an adapter": lambda folder: save_file({"lora": np.ones((9, 9))}, folder / "adapter_model.safetensors"),
}


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("files", [None, SHARDS], ids=["one file", "shards"])
def test_files_that_are_not_the_model_are_neither_counted_nor_hashed_nor_exported(tmp_path: Path, files, stray):
    folder = made_model(tmp_path / "m", files)
    names, counted, identity = [file.name for file in weight_files(folder)], read_shape(folder).parameters, base_identity(folder)
    assert names == sorted(files or ["model.safetensors"]) and counted == 24 * (3 if files else 1)
    stray(folder)
    assert [file.name for file in weight_files(resolve_model(folder))] == names
    assert read_shape(folder).parameters == counted and base_identity(folder) == identity
    publishing._copy_base(folder, tmp_path / "copy")
    assert weight_files(tmp_path / "copy") and base_identity(tmp_path / "copy") == identity
    assert {file.name for file in (tmp_path / "copy").glob("*.safetensors")} == set(names)


def spoil(name: str, content: bytes | None) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_bytes(content)


def rewritten(format_: str, shape: tuple[int, ...] = (4, 6)) -> Callable[[Path], object]:
    """The model's file with one tensor of another number format."""

    def write(folder: Path) -> None:
        bits = {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I8": 8, "U8": 8, "I32": 32, "C64": 64, "BOOL": 8, "I64": 64}
        size = int(np.prod(shape)) * bits[format_] // 8
        header = json.dumps({"x.weight": {"dtype": format_, "shape": shape, "data_offsets": [0, size]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))

    return write


def configured(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | fields))


METHODS = ("bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", "gguf", "hqq", "torchao", "mxfp4", "of_next_year")
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (spoil("model.safetensors", None), "no model.safetensors"),
    "pickles alone": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "no model.safetensors"),
    "consolidated alone": (
        lambda folder: (folder / "model.safetensors").rename(folder / "consolidated.safetensors"),
        "no model.s",
    ),
    "a lost shard": (
        spoil("model.safetensors.index.json", json.dumps({"weight_map": {"a": "model-7.safetensors"}}).encode()),
        "lacks 'model-7.safetensors'",
    ),
    "an empty index": (spoil("model.safetensors.index.json", b"{}"), "names no weight files"),
    "an adapter beside the weights": (spoil("adapter_config.json", b"{}"), "has an adapter_config.json beside its weights"),
    "cut": (lambda folder: os.truncate(folder / "model.safetensors", 100), "cut or damaged"),
    **{
        f"quantised by {name}": (configured(quantization_config={"quant_method": name}), rf"quantised \({name}\)")
        for name in METHODS
    },
    "an old compressed-tensors": (configured(compression_config={"format": "x"}), "is quantised"),
    "an old GPTQ": (spoil("quantize_config.json", b'{"bits": 4}'), r"quantised \(by quantize_config.json\)"),
    "a config in eight bits": (configured(dtype="float8_e4m3fn"), "has dtype 'float8_e4m3fn' in its config"),
    "an old config in integers": (configured(torch_dtype="int8"), "has dtype 'int8' in its config"),
    "ModelOpt": (spoil("hf_quant_config.json", b"{}"), "is quantised"),
    **{
        name: (rewritten(name), f"'x.weight' as {name}")
        for name in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I32", "C64")
    },
}


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_computed_with_is_refused_with_what_and_a_cure(tmp_path: Path, change, sentence):
    folder = made_model(tmp_path / "m")
    assert resolve_model(folder)
    change(folder)
    with pytest.raises(InputError, match=sentence) as refusal:
        resolve_model(folder)
    assert str(folder) in str(refusal.value) and ": " in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [configured(quantization_config=None), configured(quantization_config={}), rewritten("I64", (7,)), rewritten("BOOL", (7,))],
    ids=["no config", "an empty one", "positions", "flags"],
)
def test_what_only_looks_quantised_passes(tmp_path: Path, change):
    folder = made_model(tmp_path / "m")
    change(folder)
    assert resolve_model(folder) and stored_tensors(folder)


def test_a_whole_model_beside_shards_is_refused(tmp_path: Path):
    """transformers would load the one, and vLLM the others."""
    folder = made_model(tmp_path / "m", SHARDS)
    save_file({"a.weight": np.ones((4, 6), np.float32)}, folder / "model.safetensors")
    with pytest.raises(InputError, match="and the shards of"):
        resolve_model(folder)


def test_a_quantised_model_at_the_hub_is_refused_before_it_is_fetched(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    answer = SimpleNamespace(config={"quantization_config": {"quant_method": "awq"}})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(model_info=lambda name, timeout: answer))
    with pytest.raises(InputError, match=r"some/model-awq' is quantised \(awq\)"):
        ask_hub("some/model-awq")


def test_a_download_leaves_copies_of_the_model_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    there = [
        "config.json",
        "model.safetensors",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "original/params.json",
    ]
    taken: list[str] = []

    def snapshot(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        taken.extend(filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert model_files._from_hub("some/model") == tmp_path and taken == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({}, "float32"),
        ({"dtype": None}, "float32"),
    ],
)
@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_auto_is_the_model_s_own_format_and_vllm_rounds_it_to_16_bits(tmp_path: Path, config, stored, engine, dtype):
    folder = made_model(tmp_path / "m", **config)
    assert stored_format(folder, CONFIG | config) == stored
    own = "bfloat16" if engine == "vllm" and stored == "float32" else stored
    assert engine_dtype(InferenceSettings(engine=engine, dtype=dtype), stored) == (own if dtype == "auto" else dtype)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_get_the_mode_of_any_new_file(tmp_path: Path, umask: int, mode: int):
    before = os.umask(umask)
    try:
        save_file({"w": np.ones(2)}, tmp_path / "model.safetensors")
        usual_mode(tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
