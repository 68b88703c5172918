"""A bundle's file: what is packed comes out again; what was changed, cut or made to do harm is one sentence and nothing else."""

import io
import json
import lzma
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.bundle_file import unpack_bundle_file, write_bundle_file
from storage.json_files import sealed
from telemetry.errors import InputError

CONTENT = {
    "run/ledger/main/step-000007.arrow": b"ledger" * 50,
    "run/shards/local/000012.0a1b2c3d.plies.arrow": b"plies",
    "model/model.safetensors": os.urandom(5000),
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    write_bundle_file(tmp_path / "a.bundle", tmp_path / "in", {"step": 7})
    return tmp_path / "a.bundle"


@pytest.fixture
def forge(tmp_path: Path) -> Callable[..., Path]:
    """A well-packed file with these entries behind a manifest that fits them, each name or `TarInfo` with its content."""

    def write(entries: list[tuple[str | tarfile.TarInfo, bytes]], manifest: dict | None = None, tail: bytes = b"") -> Path:
        from hashlib import sha256

        named = {entry if isinstance(entry, str) else entry.name: content for entry, content in entries}
        listed = {name: {"bytes": len(content), "sha256": sha256(content).hexdigest()} for name, content in named.items()}
        text = sealed({"bundle": 1, "files": listed} | (manifest or {})).encode()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for entry, content in [("manifest.json", text), *entries]:
                info = tarfile.TarInfo(entry) if isinstance(entry, str) else entry
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        (tmp_path / "forged.bundle").write_bytes(lzma.compress(packed.getvalue() + tail, preset=0))
        return tmp_path / "forged.bundle"

    return write


def refused(file: Path, folder: Path) -> str:
    """The sentence with which a file is refused; nothing may lie outside the folder that it was to be unpacked into."""
    before = {path for path in folder.parent.rglob("*") if folder not in path.parents}
    with pytest.raises(InputError) as error:
        unpack_bundle_file(file, folder)
    assert {path for path in folder.parent.rglob("*") if folder not in path.parents} - before <= {folder}
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_was_packed_comes_out_again_and_any_tar_opens_it(bundle: Path, tmp_path: Path):
    assert unpack_bundle_file(bundle, tmp_path / "out") == {"step": 7}
    found = {
        path.relative_to(tmp_path / "out").as_posix(): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == CONTENT
    listed = subprocess.run(["tar", "tJf", str(bundle)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert listed == ["manifest.json", *sorted(CONTENT)]


def test_the_same_files_give_the_same_bytes_whenever_they_were_written(bundle: Path, tmp_path: Path):
    for file in (tmp_path / "in").rglob("*"):
        os.utime(file, (1, 1))
    (tmp_path / "in" / "model" / "model.safetensors").chmod(0o600)
    write_bundle_file(tmp_path / "b.bundle", tmp_path / "in", {"step": 7})
    assert bundle.read_bytes() == (tmp_path / "b.bundle").read_bytes()


def test_a_flipped_byte_anywhere_is_noticed(bundle: Path, tmp_path: Path):
    whole = bundle.read_bytes()
    for place in range(0, len(whole), len(whole) // 40):
        bundle.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert "bundle" in refused(bundle, tmp_path / "out")


@pytest.mark.parametrize("left", [0, 3, 40, -1, -100, -3000])
def test_a_bundle_that_is_cut_off_is_refused(bundle: Path, tmp_path: Path, left: int):
    bundle.write_bytes(bundle.read_bytes()[:left])
    assert "bundle" in refused(bundle, tmp_path / "out")


EVIL = (
    *("../evil", "/tmp/evil", "run/shards/../../../evil.arrow", "run/shards/.hidden/000001.arrow"),
    *("run/shards/local/x.arrow", "model/pytorch_model.bin", "model/x.pkl"),
)


@pytest.mark.parametrize("name", EVIL)
def test_a_name_that_no_bundle_has_is_refused_before_anything_is_written(forge, tmp_path: Path, name: str):
    assert "which no bundle has" in refused(forge([(name, b"evil")]), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*")) and not Path("/tmp/evil").exists()


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME]
)
def test_links_pipes_folders_and_long_headers_are_refused(forge, tmp_path: Path, kind: bytes):
    entry = tarfile.TarInfo("model/config.json")
    entry.type, entry.linkname = kind, "/etc/passwd"
    said = refused(forge([(entry, b"")]), tmp_path / "out")
    assert "is no regular file" in said or "is damaged" in said


def test_a_file_that_is_not_in_the_manifest_or_twice_in_it_is_refused(forge, tmp_path: Path):
    one, two = ("model/config.json", b"{}"), ("model/tokenizer.json", b"{}")
    assert "is not in its manifest" in refused(forge([one, one]), tmp_path / "out")
    listed = {"files": {"model/config.json": {"bytes": 2, "sha256": "0" * 64}}}
    assert "does not have its hash" in refused(forge([one], listed), tmp_path / "out2")
    assert "is not in its manifest" in refused(forge([one, two], listed | {"files": {}}), tmp_path / "out3")
    assert "it lacks 'model/x'" in refused(forge([], {"files": {"model/x": {"bytes": 2}}}), tmp_path / "out4")


def test_a_bomb_is_refused_before_it_is_unpacked(forge, tmp_path: Path):
    """80 MB of zeros in a small file, as an entry, and behind the end."""
    zeros = bytes(80_000_000)
    bomb = forge([("model/model.safetensors", zeros)])
    assert bomb.stat().st_size < 100_000
    assert "would unpack to more than" in refused(bomb, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*"))
    assert "would unpack to more than" in refused(forge([], tail=zeros), tmp_path / "out2")


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        pytest.param({"bundle": 2}, "has layout 2, this program reads 1", id="a later layout"),
        pytest.param({"files": [1]}, "its manifest lists no files", id="no list of files"),
        pytest.param({"files": {"model/config.json": 3}}, "its manifest lists no files", id="a number for a file"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(forge, tmp_path: Path, manifest: dict, sentence: str):
    assert sentence in refused(forge([], manifest), tmp_path / "out")


def test_foreign_files_are_no_bundles(tmp_path: Path):
    file = tmp_path / "x.bundle"
    assert "there is no bundle" in refused(file, tmp_path / "out")
    for content in (b"", b"PK\x03\x04 a zip", lzma.compress(b"no tar"), lzma.compress(b"x" * 2048)):
        file.write_bytes(content)
        assert "bundle" in refused(file, tmp_path / "out")
    with tarfile.open(file, "w:xz") as tar:
        tar.addfile(tarfile.TarInfo("manifest.json"))
    assert "no bundle" in refused(file, tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")
    assert "cannot be read" in refused(tmp_path / "pipe", tmp_path / "out")
    assert "cannot be read" in refused(tmp_path, tmp_path / "out")


def test_a_changed_manifest_is_noticed(forge, tmp_path: Path):
    whole = lzma.decompress(forge([("model/config.json", b"{}")]).read_bytes())
    assert json.loads(whole[512 : whole.index(b"\0", 512)])["bundle"] == 1
    (tmp_path / "forged.bundle").write_bytes(lzma.compress(whole.replace(b'"bytes": 2,', b'"bytes": 3,')))
    assert "its manifest does not have its checksum" in refused(tmp_path / "forged.bundle", tmp_path / "out")


def test_what_exists_is_not_overwritten_and_strange_files_are_not_packed(bundle: Path, tmp_path: Path):
    with pytest.raises(InputError, match="exists"):
        write_bundle_file(bundle, tmp_path / "in", {})
    (tmp_path / "in" / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"cannot hold a file named 'notes\.txt'"):
        write_bundle_file(tmp_path / "c.bundle", tmp_path / "in", {})
    with pytest.raises(InputError, match="there is no folder"):
        write_bundle_file(tmp_path / "none" / "c.bundle", tmp_path / "in", {})
