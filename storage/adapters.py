"""Published adapters: the LoRA weights of one policy version in peft's layout, with a manifest of sizes and SHA-256 hashes.

`adapters/v000123/` is complete once renamed, and immutable; reading verifies it. Publishing the same weights again returns the
published version, so a trainer killed between checkpoint and publication can retry; other weights under a taken number are an
error.
"""

import json
import shlex
from pathlib import Path

from entente.records.policy_version import ADAPTER_FILES, PolicyVersion, combined_hash, measure_adapter, version_in
from entente.telemetry.errors import DataError
from storage.files import folders_in, new_folder, set_aside, write_measured
from storage.json_files import read_object
from storage.runs import ADAPTER_NAME, RunPaths, numbers_in


def publish_adapter(paths: RunPaths, version: int, source_dir: Path) -> PolicyVersion:
    """Publish the adapter files from `source_dir` as `version`, after setting a damaged adapter of that version aside. Raises
    DataError if a file is missing, or the version is published with other weights."""
    final = paths.adapter(version)
    if final.exists():
        try:
            published = read_adapter(paths, version)
        except DataError:
            set_aside(final)
        else:
            if published != version_in(source_dir, version):
                raise DataError(f"{final} holds other weights than {source_dir}; a version never changes: use a new run.")
            return published
    with new_folder(final) as aside:
        files = {}
        for name in ADAPTER_FILES:
            try:
                with (source_dir / name).open("rb") as source:
                    files[name] = write_measured(aside / name, source)
            except FileNotFoundError as error:
                raise DataError(f"{source_dir} has no {name}, so it cannot be published as policy version {version}.") from error
        adapter_hash = combined_hash(str(file["sha256"]) for file in files.values())
        manifest = {"version": version, "step": version, "adapter_hash": adapter_hash, "files": files}
        (aside / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
    return PolicyVersion(version=version, adapter=final, adapter_hash=adapter_hash)


def read_adapter(paths: RunPaths, version: int) -> PolicyVersion:
    """The adapter of `version`, verified by size and hash; raises DataError if it is missing or damaged."""
    folder = paths.adapter(version)
    try:
        manifest = read_object(folder / "manifest.json")
        recorded, recorded_hash = dict(manifest["files"]), manifest["adapter_hash"]
    except FileNotFoundError as error:
        what = f"Policy version {version} is not published: {folder / 'manifest.json'} is missing"
        raise DataError(f"{what}; {_cure(paths, version)}." if folder.exists() else f"{what}.") from error
    except (DataError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'manifest.json'} is damaged; {_cure(paths, version)}.") from error
    try:
        actual, adapter_hash = measure_adapter(folder)
    except DataError as error:
        raise DataError(f"{str(error).removesuffix('.')}; {_cure(paths, version)}.") from error
    for name in recorded | actual:
        if recorded.get(name) != actual.get(name):
            raise DataError(f"{folder / name} does not match its manifest; {_cure(paths, version)}.")
    if manifest.get("version") != version or adapter_hash != recorded_hash:
        raise DataError(f"{folder / 'manifest.json'} belongs to other weights; {_cure(paths, version)}.")
    return PolicyVersion(version=version, adapter=folder, adapter_hash=adapter_hash)


def _cure(paths: RunPaths, version: int) -> str:
    """A resumed run publishes its newest version again, from the checkpoint; of older ones there may be none."""
    if version < max(published_versions(paths), default=0):
        return "choose another version of the run"
    root = "" if paths.root.parent == Path("runs") else f" --runs-root {shlex.quote(str(paths.root.parent))}"
    return f"`entente train --run {shlex.quote(paths.root.name)}{root} --resume` publishes it again"


def published_versions(paths: RunPaths) -> list[int]:
    return numbers_in(folders_in(paths.adapters), ADAPTER_NAME)
