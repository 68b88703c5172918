"""An adapter appears whole, never changes, and is verified when it is read."""

import json
from pathlib import Path

import pytest

from entente.telemetry.errors import DataError
from storage.adapters import publish_adapter, published_versions, read_adapter
from storage.runs import RunPaths


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text('{"r": 16}')
    (folder / "optimiser.pt").write_bytes(b"not published")
    return folder


def test_a_published_adapter_reads_back_verified(paths: RunPaths, tmp_path: Path) -> None:
    adapter = publish_adapter(paths, 12, weights(tmp_path / "w", b"weights"))
    assert adapter == read_adapter(paths, 12)
    assert adapter.folder == paths.root / "adapters" / "v000012"
    assert sorted(path.name for path in adapter.folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    manifest = json.loads((adapter.folder / "manifest.json").read_text())
    assert (
        manifest["version"],
        manifest["step"],
        manifest["files"]["adapter_model.safetensors"]["bytes"],
    ) == (12, 12, 7)
    assert len(adapter.adapter_hash) == 32


def test_publishing_again_is_quiet_for_the_same_weights_and_refused_for_others(paths: RunPaths, tmp_path: Path) -> None:
    first = publish_adapter(paths, 1, weights(tmp_path / "w", b"weights"))
    assert publish_adapter(paths, 1, tmp_path / "w") == first
    with pytest.raises(DataError, match="holds other weights"):
        publish_adapter(paths, 1, weights(tmp_path / "x", b"other"))
    assert (first.folder / "adapter_model.safetensors").read_bytes() == b"weights"


def test_unchanged_weights_keep_their_hash_under_a_new_version(paths: RunPaths, tmp_path: Path) -> None:
    source = weights(tmp_path / "w", b"weights")
    assert publish_adapter(paths, 1, source).adapter_hash == publish_adapter(paths, 2, source).adapter_hash
    assert publish_adapter(paths, 3, weights(tmp_path / "w", b"moved")).adapter_hash != read_adapter(paths, 2).adapter_hash
    assert published_versions(paths) == [1, 2, 3]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_damage_to_any_file_is_noticed(paths: RunPaths, tmp_path: Path, name: str, damage: str) -> None:
    path = publish_adapter(paths, 1, weights(tmp_path / "w", b"weights")).folder / name
    content = path.read_bytes()
    place = content.find(b'"sha256": "') + 11 if name == "manifest.json" else 3
    flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    path.unlink() if damage == "remove" else path.write_bytes(flipped if damage == "flip" else content[:-2])
    with pytest.raises(DataError, match=name if damage == "remove" else "v000001") as refused:
        read_adapter(paths, 1)
    assert f"`entente train --run {paths.root.name} --runs-root {paths.root.parent} --resume` publishes" in str(refused.value)
    publish_adapter(paths, 2, tmp_path / "w")
    with pytest.raises(DataError, match="choose another version"):  # there may be no checkpoint of an older one
        read_adapter(paths, 1)


def test_a_failed_publication_leaves_no_trace(paths: RunPaths, tmp_path: Path) -> None:
    source = weights(tmp_path / "w", b"weights")
    (source / "adapter_config.json").unlink()
    with pytest.raises(DataError, match=r"has no adapter_config\.json"):
        publish_adapter(paths, 1, source)
    assert list(paths.adapters.iterdir()) == []
    with pytest.raises(DataError, match="version 1 is not published"):
        read_adapter(paths, 1)
