"""What is built from this tree can be installed elsewhere, and works there with nothing of the clone at hand.

The quick claims look into the wheel. The others install it into an environment of its own, outside the clone, that borrows
the locked packages from the running one, and use it there as a person would.
"""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    """Every file in it."""
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(names: set[str]):
    on_disk = (path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert {name for name in names if ".dist-info/" not in name} == {str(path.relative_to(ROOT)) for path in on_disk}
    presets = {
        f"entente/settings/presets/{preset}.toml"
        for preset in ("laptop", "lm", "gpu-24", "gpu-40", "gpu-80", "gpu-141", "cluster")
    }
    assert {*presets, "storage/select_batch.sql", "entente/reports/page.html.jinja"} <= names


def test_the_licence_and_the_notice_travel_and_tests_and_scraps_do_not(names: set[str]):
    assert {"LICENSE", "NOTICE"} <= {name.rsplit("/", 1)[-1] for name in names if ".dist-info/licenses/" in name}
    unwanted = re.compile(r"(^|/)(tests?|__pycache__|runs|\.[^/]+)(/|$)|\.pyc$|conftest")
    assert len(names) > 200 and [name for name in names if unwanted.search(name)] == []


def test_the_wheel_says_what_it_needs_and_what_command_it_brings(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (about,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(about))
        entry_points = archive.read(about.replace("METADATA", "entry_points.txt")).decode()
    assert metadata["Requires-Python"].replace(" ", "") in (">=3.11,<3.14", "<3.14,>=3.11")
    core = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert len(core) == len(PROJECT["project"]["dependencies"])
    assert "entente = entente.cli.main:main" in entry_points


class Installed:
    """An environment outside the clone that has the wheel, and a folder to work in."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.bin = folder / "environment" / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "environment")], check=True)
        self.python = self.bin / "python"
        install = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-deps", "--no-index", "--quiet"]
        subprocess.run([*install, str(wheel)], check=True, capture_output=True)
        # A folder named in a .pth file brings its packages, but not the .pth files in it: no editable install of the clone.
        (self.site,) = (folder / "environment" / "lib").glob("python*/site-packages")
        (self.site / "locked.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in the working folder, with none of this process's settings."""
        ours = ("PREFECT_", "ENTENTE_", "WANDB_", "PYTHON", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        kept["PATH"] = f"{self.bin}{os.pathsep}{kept['PATH']}"
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(program, cwd=self.work, env=kept, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel, installed."""
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


@pytest.mark.system
def test_the_command_tells_what_it_can_do_and_the_doctor_finds_nothing_wrong(installed: Installed):
    told = installed.run("entente", "--help")
    assert told.returncode == 0 and "Train a policy" in told.stdout, told.stderr
    version = installed.run("entente", "--version")
    assert version.stdout.strip() == PROJECT["project"]["version"]
    done = installed.run("entente", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]
    assert list(installed.work.iterdir()) == []


@pytest.mark.slow
def test_a_run_from_an_empty_folder_trains_and_can_be_asked(installed: Installed):
    small = ["--evaluation.positions", "4"]
    short = ["--steps", "3", "--rollouts.start-groups", "2", "--tiny-model.imitation-steps", "12"]
    done = installed.run("entente", "train", "--preset", "laptop", "--run", "first", "--json", *short, *small, timeout=600)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["orders_rejected"]) == (3, 0)
    run = installed.work / "runs" / "first"
    assert sorted(path.name for path in (run / "adapters").iterdir()) == ["v000001", "v000002", "v000003"]
    assert list(run.glob("wandb/offline-run-*")), "W&B keeps figures without an account"
    asked = installed.run("entente", "sql", "--run", "first", "select count(*) as decisions from decisions")
    assert str(summary["decisions"]) in asked.stdout
