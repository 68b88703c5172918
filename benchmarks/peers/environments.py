"""Where each peer is installed, and whether it is the version that is recorded in `requirements/`.

Peers that come with this project's environment are recorded in `requirements/cpu.lock`. A peer that clashes with it has an
environment of its own, made from `requirements/peers-NAME.txt` in a folder outside the repository.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, MetadataPathFinder
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
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
        return REQUIREMENTS / (f"peers-{self.environment}.txt" if self.environment else "cpu.lock")


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
    """Canonical name -> version of a file in which every line is an exact pin.

    Raises:
        InputError: the file is missing, or a line is not an exact pin.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise InputError(f"'{file}' cannot be read: run this benchmark in a checkout of the repository") from error
    pins = {}
    for line in lines:
        text = line.split("#")[0].strip()
        if not text:
            continue
        try:
            pin = Requirement(text)
        except InvalidRequirement as error:
            raise InputError(f"'{file}' has a line that is no requirement: {text!r}") from error
        found = list(pin.specifier)
        if len(found) != 1 or found[0].operator != "==":
            raise InputError(f"'{file}' has a line that pins no exact version: {text!r}")
        pins[canonicalize_name(pin.name)] = found[0].version
    return pins


def installed_versions(environment: Path) -> dict[str, str]:
    """Canonical name -> version of what is installed in a virtual environment, read from its files; {} without one."""
    folders = [str(folder) for folder in sorted(environment.glob("lib/python*/site-packages"))]
    return _versions(Distribution.discover(path=folders)) if folders else {}


def _versions(distributions: object) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in distributions:  # type: ignore[attr-defined]
        found.setdefault(canonicalize_name(each.metadata["Name"]), each.version)
    return found


def missing_sentence(figure: str, folder: Path) -> str | None:
    """Why `figure` cannot be measured, with the command that cures it; None if its peer is the recorded version.

    Args:
        folder: folder of the environments.

    Raises:
        InputError: the record of versions cannot be read.
    """
    peer = PEERS[figure]
    recorded = read_pins(peer.recorded_in)[canonicalize_name(peer.distribution)]
    if peer.environment:
        there = installed_versions(folder / peer.environment)
        cure = f"`entente bench peers --install --only {figure}`"
        if folder != default_folder():
            cure = f"{cure[:-1]} --environments {folder}`"
    else:
        there, cure = _versions(MetadataPathFinder.find_distributions()), "`make setup`"
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
