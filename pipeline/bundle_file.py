"""The file of a bundle: a tar of regular files, packed with xz, whose first file is a manifest with the size and SHA-256 of each.

Any `tar` opens it. No file is a pickle. Equal contents give equal bytes with one version of xz. Reading trusts nothing: only
names that a bundle may have are written, each below the folder that is given, and no more bytes than the manifest says; the
manifest itself is sealed. What does not fit is refused with a sentence before anything is used.
"""

import hashlib
import io
import json
import lzma
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from storage.files import open_regular
from storage.json_files import is_sealed, sealed
from storage.runs import durable_write
from telemetry.errors import InputError

LAYOUT = 1
"""Version of the layout, the manifest's entry `bundle`."""
_MANIFEST = "manifest.json"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_WEIGHTS = r"(?:manifest\.json|adapter_config\.json|adapter_model\.safetensors|trainer\.safetensors|value_head\.safetensors)"
_MODEL = r"(?:(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|recipe)\.json|chat_template\.jinja|"
_MAY_HOLD = re.compile(
    rf"run/(?:ledger/{_NAME}/(?:step-\d+\.(?:arrow|json)|lineage\.json)|shards/{_NAME}/\d+(?:\.[0-9a-f]{{8}}\.plies)?\.arrow|"
    rf"lessons/{_NAME}/\d+\.arrow|checkpoints/step_\d+/{_WEIGHTS}|adapters/v\d+/{_WEIGHTS})|"
    rf"model/{_MODEL}model\.safetensors|value_head/value_head\.safetensors)"
)
"""Names that a bundle may have. None can lead out of a folder."""
_SMALL = 64 << 20
"""Bytes up to which a bundle is packed as small as it can be; a larger one is packed quickly."""
_XZ, _BLOCK = b"\xfd7zXZ\x00", tarfile.BLOCKSIZE
_LARGEST_MANIFEST = 4 << 20
_UNPACKING_MEMORY = 128 << 20
_ALWAYS_ALLOWED, _LARGEST_RATIO = 64 << 20, 100
"""A bundle may unpack to this many bytes, and to this many times its size more: rows pack twenty times, weights hardly."""


def write_bundle_file(file: Path, folder: Path, facts: Mapping[str, Any]) -> None:
    """Pack all files below `folder` with a manifest of `facts`; links are followed.

    Raises:
        InputError: `file` exists, or a file has a name that no bundle has.
    """
    if file.exists():
        raise InputError(f"'{file}' exists: name another file, or remove it")
    if not file.parent.is_dir():
        raise InputError(f"there is no folder '{file.parent}' to write the bundle to: make it first")
    contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if strange := [name for name in contents if not _MAY_HOLD.fullmatch(name)]:
        raise InputError(f"a bundle cannot hold a file named '{strange[0]}'")
    listed = {name: {"bytes": len(content), "sha256": _sha256(content)} for name, content in sorted(contents.items())}
    manifest = sealed({"bundle": LAYOUT, **facts, "files": listed}).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in [(_MANIFEST, manifest), *sorted(contents.items())]:
            entry = tarfile.TarInfo(name)  # time, owner and mode are the same on every machine
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    durable_write(file, _packed(packed.getvalue()))


def _packed(content: bytes) -> bytes:
    # Literals get the context of their place in a float: half a megabyte less for a tiny model than xz's own choice.
    chosen = {"id": lzma.FILTER_LZMA2, "preset": 6 if len(content) <= _SMALL else 0, "lc": 1, "lp": 2, "pb": 2}
    return lzma.compress(content, check=lzma.CHECK_CRC64, filters=[chosen])


def unpack_bundle_file(file: Path, folder: Path) -> dict[str, Any]:
    """Write the files of a bundle below `folder`, each verified; returns the manifest without what is about the file itself.

    Raises:
        InputError: the file is missing, is no bundle, or was changed, cut or made to do harm.
    """
    try:
        with open_regular(file) as packed:
            return _unpack(_Entries(packed, file), folder)
    except FileNotFoundError as error:
        raise InputError(f"there is no bundle '{file}'") from error
    except OSError as error:
        if error.filename is None:
            raise
        raise InputError(f"bundle '{file}' cannot be read: {error.strerror}") from error
    except (lzma.LZMAError, tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"bundle '{file}' is damaged or cut off ({error}): ask for it again") from error


def _unpack(entries: "_Entries", folder: Path) -> dict[str, Any]:
    file, found = entries.file, iter(entries)
    first = next(found, None)
    if first is None or first[0] != _MANIFEST or first[1] > _LARGEST_MANIFEST:
        raise InputError(f"'{file}' is no bundle: it does not begin with a manifest")
    record = _read_manifest(file, entries.read(first[1]))
    listed = record.pop("files")
    for name, size in found:
        if not _MAY_HOLD.fullmatch(name):
            raise InputError(f"bundle '{file}' is refused: it holds '{name[:100]}', which no bundle has")
        stated = listed.pop(name, None)
        if stated is None or stated.get("bytes") != size:
            raise InputError(f"bundle '{file}' is refused: '{name}' is not in its manifest, or not of this size, or twice in it")
        content = entries.read(size)
        if _sha256(content) != stated.get("sha256"):
            raise InputError(f"bundle '{file}' was changed: '{name}' does not have its hash; ask for it again")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    if listed:
        raise InputError(f"bundle '{file}' is cut off: it lacks '{next(iter(listed))[:100]}'; ask for it again")
    return {name: value for name, value in record.items() if name not in ("bundle", "checksum")}


def _read_manifest(file: Path, content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or "bundle" not in record:
        raise InputError(f"'{file}' is no bundle: its manifest is none of Entente's")
    if record["bundle"] != LAYOUT:
        raise InputError(
            f"bundle '{file}' has layout {record['bundle']!r}, this program reads {LAYOUT}: use the release that wrote it"
        )
    if not is_sealed(record):
        raise InputError(f"bundle '{file}' was changed: its manifest does not have its checksum; ask for it again")
    files = record.get("files")
    if not isinstance(files, dict) or not all(isinstance(stated, dict) for stated in files.values()):
        raise InputError(f"bundle '{file}' is damaged: its manifest lists no files")
    return record


class _Entries:
    """The entries of a packed tar in their order: name and size of each; its content is read with `read`, or passed over."""

    def __init__(self, packed: BinaryIO, file: Path) -> None:
        self.file = file
        self._packed = packed
        size = packed.seek(0, io.SEEK_END)
        packed.seek(0)
        if packed.read(len(_XZ)) != _XZ:
            raise InputError(f"'{file}' is no bundle: `entente bundle --run RUN --step STEP --to FILE` writes one")
        packed.seek(0)
        self._xz = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACKING_MEMORY)
        self._left = _ALWAYS_ALLOWED + _LARGEST_RATIO * size
        self._allowed = self._left
        self._waiting = bytearray()

    def __iter__(self) -> Iterator[tuple[str, int]]:
        while (block := self.read(_BLOCK)) != bytes(_BLOCK):
            entry = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
            if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or entry.size < 0:
                raise InputError(f"bundle '{self.file}' is refused: '{entry.name[:100]}' is no regular file")
            after = self._left - -(-entry.size // _BLOCK) * _BLOCK
            yield entry.name, entry.size
            self.read(self._left - after)  # what was not read, and the padding
        while self._waiting or self._more(1 << 16):  # the end of a tar is empty blocks
            if any(self.read(len(self._waiting))):
                raise InputError(f"bundle '{self.file}' is damaged: something follows its end; ask for it again")
        if self._xz.unused_data or self._packed.read(1):
            raise InputError(f"bundle '{self.file}' is damaged: something follows its end; ask for it again")

    def read(self, size: int) -> bytes:
        """The next `size` bytes.

        Raises:
            EOFError: there are fewer.
            InputError: that is more than a bundle of its packed size holds.
        """
        if size > self._left:
            raise InputError(
                f"bundle '{self.file}' is refused: it would unpack to more than {self._allowed / 1e6:,.0f} MB, which no bundle "
                "of its size does"
            )
        while len(self._waiting) < size:
            if not self._more(size - len(self._waiting)):
                raise EOFError("it ends too early")
        self._left -= size
        found = bytes(self._waiting[:size])
        del self._waiting[:size]
        return found

    def _more(self, size: int) -> bool:
        """Unpack about `size` more bytes; False at the end."""
        if self._xz.eof:
            return False
        packed = self._packed.read(1 << 16) if self._xz.needs_input else b""
        if not packed and self._xz.needs_input:
            raise EOFError("it ends too early")
        self._waiting += self._xz.decompress(packed, max_length=max(size, _BLOCK))
        return True


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
