"""Keeps CUDA wheels of vLLM in a folder outside the repository, and compares one with the installed build."""

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from scripts.check_gpu.lock import GPU_LOCK, read_lock
from scripts.check_gpu.source import PACKAGE, VllmSource
from telemetry.errors import EntenteError, InputError

FOLDER_VARIABLE = "ENTENTE_WHEELS"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_34_x86_64",
    "manylinux_2_35_x86_64",
    "manylinux1_x86_64",
)
DOWNLOAD_S = 900
"""Longest time of a download, seconds; a wheel has about 300 MB."""


def pinned_version() -> str:
    """vLLM's version in requirements/gpu.lock."""
    pin: Requirement = read_lock(GPU_LOCK)[PACKAGE]
    return str(pin.specifier).removeprefix("==")


def wheels_folder() -> Path:
    """The folder of the wheels: the variable `FOLDER_VARIABLE`, else one in the user's cache."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entente" / "wheels"


def cached_wheel(folder: Path, version: str) -> Path | None:
    """The wheel of a version; None: it was not downloaded."""
    return next(iter(sorted(folder.glob(f"{PACKAGE}-{version}-*.whl"))), None)


def get_wheel(folder: Path, version: str) -> Path:
    """The wheel of a version, from the folder, else from the package index that pip is configured for.

    Raises:
        InputError: the folder cannot be made.
        EntenteError: the index does not have it, or does not answer.
    """
    if found := cached_wheel(folder, version):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"folder '{folder}' for wheels cannot be made ({error.strerror}): name another by {FOLDER_VARIABLE}"
        ) from error
    tags = [flag for each in PLATFORMS for flag in ("--platform", each)]
    # pip moves a wheel into the folder when it is complete.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        *tags,
        "--dest",
        str(folder),
    ]
    command += ["--implementation", "cp", "--python-version", "3.12", "--abi", "abi3", "--abi", "cp312", f"{PACKAGE}=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
        why = next(
            (line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), f"pip ended with {done.returncode}"
        )
    except subprocess.TimeoutExpired:
        why = f"it took longer than {DOWNLOAD_S} s"
    if found := cached_wheel(folder, version):
        return found
    raise EntenteError(
        f"the CUDA wheel of vLLM {version} could not be downloaded ({why.removeprefix('ERROR: ')}): "
        f"run this where the package index answers, or put the wheel into '{folder}'"
    )


def installed() -> tuple[Path, str] | None:
    """The folder that contains the installed vLLM, and its distribution with the version; None: none is installed."""
    for name in (f"{PACKAGE}-cpu", PACKAGE):
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        return Path(str(found.locate_file(""))), f"{name} {found.version}"
    return None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Python files of a wheel and of an installation, paths beginning with `vllm/`."""

    equal: int
    differ: tuple[str, ...]
    only_in_wheel: tuple[str, ...]
    only_installed: tuple[str, ...]


def compare(wheel: VllmSource, here: VllmSource) -> Comparison:
    """Compare file by file, byte by byte."""
    shared = wheel.files & here.files
    differ = tuple(sorted(path for path in shared if wheel.read(path) != here.read(path)))
    return Comparison(
        equal=len(shared) - len(differ),
        differ=differ,
        only_in_wheel=tuple(sorted(wheel.files - here.files)),
        only_installed=tuple(sorted(here.files - wheel.files)),
    )
