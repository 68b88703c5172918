"""Published adapters: the LoRA weights of one policy version in peft's layout, with a manifest.

`adapters/v000123/` gets its name by one rename, when it is complete, and never changes. The manifest holds the sizes and
SHA-256 hashes of its files; reading verifies them. To publish the same weights again returns the published version, so a
trainer that was killed between checkpoint and publication can publish again. Other weights under an existing version number are
an error.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

from entente.records.policy_version import PolicyVersion
from entente.telemetry.errors import DataError
from entente.telemetry.read_file import open_regular
from storage.files import folders_in, make_directory, name_aside, publish_directory, set_aside
from storage.json_files import read_object
from storage.runs import RunPaths

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_VERSION_NAME = re.compile(r"v(\d{6,})")


def publish_adapter(paths: RunPaths, version: int, source_dir: Path) -> PolicyVersion:
    """Copy the adapter files from `source_dir` and publish them as `version`, the number of trainer steps.

    A damaged adapter of that version is set aside first.

    Raises:
        DataError: a file is missing, or the version is published with other weights.
    """
    final = paths.adapter(version)
    if final.exists():
        try:
            published = read_adapter(paths, version)
        except DataError:
            set_aside(final)
        else:
            if _measure(final) != _measure(source_dir):
                raise DataError(f"{final} holds other weights than {source_dir}; a version never changes: use a new run.")
            return published
    make_directory(final.parent)
    aside = name_aside(final)
    aside.mkdir()
    try:
        for name in ADAPTER_FILES:
            if not (source_dir / name).is_file():
                raise DataError(f"{source_dir} has no {name}, so it cannot be published as policy version {version}.")
            shutil.copyfile(source_dir / name, aside / name)
        files = _measure(aside)
        manifest = {"version": version, "step": version, "adapter_hash": _combined(files), "files": files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
        publish_directory(aside, final)
    finally:
        if aside.exists():
            shutil.rmtree(aside)
    return PolicyVersion(version=version, adapter=final, adapter_hash=manifest["adapter_hash"])


def read_adapter(paths: RunPaths, version: int) -> PolicyVersion:
    """The adapter of `version`, verified by size and hash.

    Raises:
        DataError: it is not published, or a file is damaged.
    """
    folder = paths.adapter(version)
    try:
        manifest = read_object(folder / "manifest.json")
        recorded, adapter_hash = dict(manifest["files"]), manifest["adapter_hash"]
    except FileNotFoundError as error:
        raise DataError(f"Policy version {version} is not published: {folder / 'manifest.json'} is missing.") from error
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'manifest.json'} is damaged; remove {folder} and publish the version again.") from error
    found = _measure(folder)
    for name in recorded | found:
        if recorded.get(name) != found.get(name):
            raise DataError(f"{folder / name} does not match its manifest; remove {folder} and publish again.")
    if manifest.get("version") != version or adapter_hash != _combined(found):
        raise DataError(f"{folder / 'manifest.json'} belongs to other weights; remove {folder} and publish again.")
    return PolicyVersion(version=version, adapter=folder, adapter_hash=adapter_hash)


def adapter_hash_in(folder: Path) -> str:
    """The hash of the adapter in any folder, 32 hex digits, as its version would have it.

    Raises:
        DataError: a file is missing or cannot be read.
    """
    return _combined(_measure(folder))


def published_versions(paths: RunPaths) -> list[int]:
    """Policy versions that have an adapter, in ascending order."""
    return sorted(int(match[1]) for name in folders_in(paths.adapters) if (match := _VERSION_NAME.fullmatch(name)))


def _measure(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size and hash of each adapter file."""
    found: dict[str, dict[str, int | str]] = {}
    for name in ADAPTER_FILES:
        try:
            with open_regular(folder / name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError as error:
            raise DataError(f"{folder / name} is missing; an adapter is {' and '.join(ADAPTER_FILES)}.") from error
        except OSError as error:
            raise DataError(f"{folder / name} cannot be read ({error.strerror}); remove {folder} and publish again.") from error
        found[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    return found


def _combined(files: dict[str, dict[str, int | str]]) -> str:
    return hashlib.sha256("".join(str(files[name]["sha256"]) for name in ADAPTER_FILES).encode()).hexdigest()[:32]
