"""`entente doctor`: environment checks; each problem comes with a fix. Reads only package metadata, paths and
system information, and asks the hub for a model that is not here. The only heavy import is Prefect, if a server is
configured."""

import os
import platform
import re
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.table import Table

from entente.cli.terminal import cell, output_console, print_json
from entente.telemetry.errors import EntenteError, InputError
from entente.telemetry.machine import free_memory, usable_cores

if TYPE_CHECKING:
    from entente.settings.run_settings import RunSettings

HOME = Path(__file__).resolve().parents[2]
"""Folder that holds the package `entente`; in a clone, it also holds pyproject.toml."""
LOCKED = "install the locked versions: `make setup` in a clone"
_COLOURS = {"problem": "bold red", "ok": "green"}
_COLUMNS = 120
_LEAST_DISK = 2**28
_MAY_NAME_A_SERVER = re.compile(r"PREFECT_API_URL|\burl\s*=", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str
    state: Literal["problem", "ok"]
    sentence: str
    cure: str = ""


_ok, _problem = (partial(Finding, state=state) for state in ("ok", "problem"))


def doctor(
    *,
    preset: Annotated[str, Parameter(help="Preset of the run to check for.")] = "laptop",
    config: Annotated[list[Path] | None, Parameter(help="TOML files that override the preset.", negative="")] = None,
    runs_root: Annotated[Path | None, Parameter(help="Folder of all runs; default: that of the settings.")] = None,
    json: Annotated[bool, Parameter(help="Print the findings as one JSON object.", negative="")] = False,
) -> None:
    """Check this environment: list every problem that would stop a run, and its fix; exits with 1 if there is one.

    Examples

        entente doctor

        entente doctor --preset gpu-24 --json
    """
    findings = examine(runs_root, preset, config or [])
    wrong = any(finding.state == "problem" for finding in findings)
    if json:
        print_json({"ok": not wrong, "verdict": verdict(findings), "checks": [asdict(each) for each in findings]})
    else:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        for each in findings:
            text = each.sentence + (f"\n→ {each.cure}" if each.cure else "")
            table.add_row(f"[{_COLOURS[each.state]}]{each.state}[/]", each.name, cell(text, keep="\n"))
        output_console(_COLUMNS).print(table)
        print(verdict(findings))
    if wrong:
        raise SystemExit(1)


def examine(runs_root: Path | None, preset: str, config: Sequence[Path]) -> list[Finding]:
    from entente.settings.layers import layered_settings

    installed = _installed()
    settings = layered_settings(preset, config, {} if runs_root is None else {"runs_root": runs_root})
    runs_root = settings.runs_root
    findings = [*check_versions(installed, *declared()), *check_run(settings)]
    findings += [*check_folders(runs_root), *check_size(runs_root), *check_prefect()]
    return sorted(findings, key=lambda each: each.state == "ok")


def verdict(findings: Sequence[Finding]) -> str:
    problems = sum(each.state == "problem" for each in findings)
    return f"not ready: {problems} problem{'s' * (problems > 1)} would stop a run" if problems else "ready: a run can start"


def check_versions(installed: dict[str, str], python: str, requirements: Sequence[str]) -> Iterator[Finding]:
    """Check Python and packages against the declared requirements; packages of an extra are checked only if installed."""
    here = platform.python_version()
    if sys.flags.optimize > 1:
        sentence = "it runs with -OO, without the docstrings that transformers reads"
        yield _problem(name="Python", sentence=sentence, cure="unset PYTHONOPTIMIZE, or set it to 1")
    elif SpecifierSet(python).contains(here, prereleases=True):
        yield _ok(name="Python", sentence=here)
    else:
        cure = "create the environment with another Python: PYTHON=python3.12 make setup"
        yield _problem(name="Python", sentence=f"Python {here}, but this needs {python}", cure=cure)
    wrong = []
    for requirement in map(Requirement, requirements):
        version = installed.get(canonicalize_name(requirement.name))
        extra = requirement.marker is not None and "extra" in str(requirement.marker)
        if (extra and version is None) or not (extra or requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            is_there = f"{requirement.name} {version}" if version else f"no {requirement.name}"
            wrong.append(f"{is_there} is installed, but {requirement.name}{requirement.specifier} is needed")
    if wrong:
        yield _problem(name="versions", sentence="; ".join(wrong), cure=LOCKED)
    else:
        versions = ", ".join(f"{name} {installed[name]}" for name in ("torch", "prefect", "duckdb") if name in installed)
        yield _ok(name="versions", sentence=f"all declared requirements are met: {versions}")


def check_run(settings: "RunSettings") -> Iterator[Finding]:
    from entente.inference.choose_engine import engine_here
    from entente.inference.engine_cards import unused_card
    from entente.settings.find_model import TINY, check_room, model_for_plan
    from entente.settings.layers import check_prompts
    from entente.telemetry.cards import torch_cuda, torch_problem, unusable_cards, visible_cards
    from entente.telemetry.vllm_environment import COMPILER, find_vllm, missing_to_compile

    urls = settings.inference.urls
    model = settings.inference.model
    try:
        folder = model_for_plan(settings)
    except InputError as error:
        yield _problem(name="model", sentence=str(error), cure="a run needs it: follow the message, or name another model")
    else:
        there = str(folder) if folder else "a run makes it" if model == TINY else "a run downloads it from the hub, which has it"
        yield _ok(name="model", sentence=f"'{model}': {there}")
        try:
            check_prompts(settings)
            check_room(settings, trains=True)
        except InputError as error:
            yield _problem(name="run", sentence=str(error), cure="change that setting")
    if settings.pipeline.task_runner == "dask":
        from tasks.dask_rollouts import check_scheduler

        try:
            check_scheduler(settings.pipeline.dask_address)
        except InputError as error:
            yield _problem(name="Dask", sentence=str(error), cure="follow the message, or set pipeline.task_runner to 'threads'")
    try:
        vllm = find_vllm()
        text = f"vLLM {vllm.text}, with torch {vllm.torch}, in the environment of '{vllm.python}'" if vllm else ""
        kind, reason = ("", f"vLLM servers at {', '.join(urls)}") if urls else engine_here(settings.inference)
        yield _ok(name="engine", sentence=f"{reason}; {text}" if kind == "vllm" else reason)
        unused = unused_card(settings.inference)
    except InputError as error:
        sentence, _, cure = str(error).partition(": ")
        yield _problem(name="engine", sentence=sentence, cure=cure)
        vllm, unused = None, ""
    lost, cards, cuda = unusable_cards(), visible_cards(), torch_cuda()
    trains_here = settings.training.device != "cpu" and not unused
    if (cuda or trains_here) and (problem := torch_problem()):
        yield _problem(name="CUDA", sentence=problem[0], cure=problem[1])
    if cards and cuda and (missing := missing_to_compile(Path(sysconfig.get_paths()["include"]) / "Python.h")):
        yield _problem(name="compiler", sentence=f"Triton compiles kernels at the first use, and {missing}", cure=COMPILER)
    gpus = [card.name for card in cards]
    if vllm is not None and vllm.build == "cuda" and not gpus:
        sentence = "; ".join(["none is visible here, though vLLM is built for CUDA", *lost])
        yield _ok(name="GPU", sentence=sentence, cure="nvidia-smi must list a card, and CUDA_VISIBLE_DEVICES must not hide it")
    elif unused:
        sentence, _, cure = unused.rpartition("; ")
        yield _problem(name="GPU", sentence=sentence, cure=cure)
    else:
        cure = "`nvidia-smi` says more; a lost card comes back with a restart of the machine" if lost else ""
        yield _ok(name="GPU", sentence="; ".join([", ".join(gpus) or "none, and none is needed", *lost]), cure=cure)


def check_folders(runs_root: Path) -> Iterator[Finding]:
    from entente.prefect_server.own_server import check_home
    from storage.runs import check_runs_root

    for name, check in (("runs", lambda: check_runs_root(runs_root)), ("Prefect", check_home)):
        try:
            check()
        except InputError as error:
            sentence, _, cure = str(error).rpartition(": ")
            yield _problem(name=name, sentence=sentence, cure=cure)
        except OSError as error:
            yield _problem(name=name, sentence=f"cannot use '{error.filename}' ({error.strerror})", cure="name another folder")


def check_size(runs_root: Path) -> Iterator[Finding]:
    yield _ok(name="machine", sentence=f"{usable_cores()} cores, {free_memory() / 2**30:.1f} GiB of memory available")
    folder = next(each for each in (runs_root.absolute(), *runs_root.absolute().parents) if each.exists())
    free = shutil.disk_usage(folder).free
    sentence = f"{free / 2**30:.1f} GiB free for '{runs_root}'"
    if free >= _LEAST_DISK:
        yield _ok(name="disk", sentence=sentence)
    else:
        yield _problem(name="disk", sentence=sentence, cure="make room, or choose another --runs-root")


def check_prefect() -> Iterator[Finding]:
    """Check the configured server, or without one the database of the server that commands start; and its disk space."""
    from entente.prefect_server.database import check_database, check_room
    from entente.prefect_server.own_server import check_address, check_client

    address = _server_address()
    try:
        check_client()
        check_address(address) if address else check_database()
        check_room()
    except (EntenteError, ImportError) as error:
        yield _problem(name="Prefect", sentence=str(error), cure="follow the message; a run would fail at its start")
    else:
        yield _ok(name="Prefect", sentence=f"a server answers at {address}" if address else "each command can start a server")


def _server_address() -> str:
    """Address of the server that runs use, empty without one, as Prefect finds it: in the environment or in files."""
    if address := os.environ.get("PREFECT_API_URL"):
        return address
    home = Path(os.environ.get("PREFECT_HOME") or ".prefect")
    files = (each for each in map(Path, ("prefect.toml", "pyproject.toml", ".env", home / "profiles.toml")) if each.is_file())
    if not any(_MAY_NAME_A_SERVER.search(each.read_text(encoding="utf-8", errors="replace")) for each in files):
        return ""
    from prefect.settings import Settings

    return Settings().api.url or ""


def declared() -> tuple[str, list[str]]:
    """Range of Python versions, and requirements: from pyproject.toml in a clone, else from the installed metadata."""
    if (file := HOME / "pyproject.toml").is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        extras = [
            f"{Requirement(text).name}{Requirement(text).specifier} ; extra == '{extra}'"
            for extra, texts in project["optional-dependencies"].items()
            for text in texts
        ]
        return project["requires-python"], [*project["dependencies"], *extras]
    ours = metadata.distribution("entente")
    return ours.metadata.get("Requires-Python") or "", ours.requires or []


def _installed() -> dict[str, str]:
    """Canonical name -> version of every installed package; if two are installed, the first on sys.path, as in an import."""
    return {canonicalize_name(package.name): package.version for package in reversed([*metadata.distributions()]) if package.name}
