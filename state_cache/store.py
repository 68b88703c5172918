"""The state cache on disk: one immutable folder per version, `v-<settings hash>/`.

It holds `train.arrow`, `held_out.arrow` and `manifest.json`, which also marks sources that the settings only name. Published
atomically: written under another name, synced, renamed. The reader refuses an incomplete or changed file, or one of another
schema, and names it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b, sha256
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from entente.game.snapshot import Snapshot
from entente.telemetry.errors import DataError, InputError
from state_cache.settings import CacheSettings
from storage.files import new_folder, write_measured

SCHEMA_VERSION = 5
MANIFEST = "manifest.json"
SOURCES = "sources"
"""Entry of the manifest; absent in a cache that depends on its settings alone, or is of an earlier release."""
FILES = ("train.arrow", "held_out.arrow")

_ARROW_TYPES = {str: pa.string(), int: pa.int64(), tuple[int, ...]: pa.list_(pa.int32())}
SCHEMA = pa.schema(
    [pa.field(field.name, _ARROW_TYPES[field.type], nullable=False) for field in fields(Snapshot)],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
"""One column per field of Snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCache:
    path: Path
    settings: CacheSettings
    train: tuple[Snapshot, ...]
    held_out: tuple[Snapshot, ...]
    """Positions for evaluation only, from other games."""


def version_name(settings: CacheSettings) -> str:
    content = f"{SCHEMA_VERSION} {settings.model_dump_json()}"
    return "v-" + blake2b(content.encode(), digest_size=6).hexdigest()


def find_cache(root: Path, settings: CacheSettings) -> Path | None:
    path = root / version_name(settings)
    return path if (path / MANIFEST).is_file() else None


def write_cache(
    root: Path,
    settings: CacheSettings,
    train: Sequence[Snapshot],
    held_out: Sequence[Snapshot],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Publish a version, unless it exists, and return its folder; a DataError if a folder without manifest is in the way.
    `sources`: name -> mark of what the positions also depend on."""
    final = root / version_name(settings)
    if find_cache(root, settings) is not None:
        return final
    try:
        with new_folder(final) as aside:
            files = {}
            for name, snapshots in zip(FILES, (train, held_out), strict=True):
                files[name] = {"rows": len(snapshots)} | write_measured(aside / name, _encode(snapshots))
            body = {
                "schema_version": SCHEMA_VERSION,
                "settings": settings.model_dump(mode="json"),
                "files": files,
            } | ({SOURCES: dict(sources)} if sources else {})
            (aside / MANIFEST).write_text(json.dumps({**body, "sha256": _body_hash(body)}, indent=2))
    except DataError:
        # Another process may have published the same version meanwhile. Equal settings give equal content.
        if find_cache(root, settings) is None:
            raise
    return final


def open_cache(path: Path, wanted: CacheSettings | None = None) -> StateCache:
    """Read and verify a version; `wanted` None accepts any settings. Raises InputError if there is no such folder, and
    DataError if a file is missing, incomplete, changed or of another schema, or the cache was built from other settings."""
    if not path.is_dir():
        raise InputError(f"There is no state cache at {path}. Build it first.")
    manifest = _read_manifest(path / MANIFEST)
    try:
        settings = CacheSettings.model_validate(manifest["settings"])
    except ValidationError as error:
        raise DataError(f"{path / MANIFEST} has settings of another version ({error}). Build the state cache again.") from error
    if wanted not in (None, settings):
        raise DataError(f"{path} was built from settings that do not match its name. Delete it and build the state cache again.")
    train, held_out = (_read_part(path / name, manifest["files"][name]) for name in FILES)
    return StateCache(path=path, settings=settings, train=train, held_out=held_out)


def _encode(snapshots: Sequence[Snapshot]) -> bytes:
    columns = {name: [getattr(snapshot, name) for snapshot in snapshots] for name in SCHEMA.names}
    sink = BytesIO()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(pa.table(columns, schema=SCHEMA))
    return sink.getvalue()


def _read_part(path: Path, entry: dict[str, Any]) -> tuple[Snapshot, ...]:
    content = _read_bytes(path)
    if len(content) != entry["bytes"] or sha256(content).hexdigest() != entry["sha256"]:
        raise DataError(
            f"{path} is not the file that was published ({len(content)} bytes, {entry['bytes']} expected). "
            "Delete its folder and build the state cache again."
        )
    with pa.ipc.open_file(pa.BufferReader(content)) as reader:
        if not reader.schema.equals(SCHEMA, check_metadata=True):
            raise DataError(f"{path} has another schema than version {SCHEMA_VERSION}. Build the state cache again.")
        rows = reader.read_all().to_pylist()
    return tuple(Snapshot(**{**row, "centres": tuple(row["centres"])}) for row in rows)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(_read_bytes(path))
        stated_hash = body.pop("sha256")
        version = body["schema_version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not the manifest of a state cache ({error!r}). Build the state cache again.") from error
    if stated_hash != _body_hash(body):
        raise DataError(f"{path} was changed after it was written. Delete its folder and build the state cache again.")
    if version != SCHEMA_VERSION:
        raise DataError(f"{path} has schema version {version}; this program reads {SCHEMA_VERSION}. Build the state cache again.")
    return dict(body)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing. Delete its folder and build the state cache again.") from error


def _body_hash(body: dict[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
