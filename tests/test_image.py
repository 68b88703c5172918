"""The Containerfile is built for real, on a root file system made on the spot; a run is trained in the image.

It loads a Debian and the packages of requirements/cpu.lock, and takes some 15 GB of disk for as long as it lasts.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import SMALL_RUN
from tests.test_docs import PACKAGES, project_files

ROOT = Path(__file__).resolve().parent.parent
SUITE = "bookworm"
"""Debian with Python 3.11."""
MISSING = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} (apt-get install buildah debootstrap)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap and buildah's chroot need root"),
]
SECRET = "a-key-that-stays-on-this-machine"
PLANTED = (".prefect/key", "runs/mine/settings.json", "key.env", "cli/__pycache__/key.pyc", "tests/key.py", ".git/config")


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """`buildah WORDS` with a storage of its own; what it prints."""
    storage = tmp_path_factory.mktemp("storage")
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot", "TMPDIR": str(storage)}

    def run(*words: str, timeout: float = 300) -> str:
        line = ["buildah", "--root", str(storage / "root"), "--runroot", str(storage / "run"), *words]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{' '.join(line)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    yield run
    shutil.rmtree(storage)


@pytest.fixture(scope="module")
def base(buildah: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A base image: Debian's smallest system with a Python."""
    root = tmp_path_factory.mktemp("debian")
    made = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", SUITE, str(root)]
    done = subprocess.run(made, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"no Debian could be loaded: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    container = buildah("from", "scratch").strip()
    buildah("copy", "--quiet", container, str(root), "/")
    buildah("commit", "--quiet", "--rm", container, "base")
    shutil.rmtree(root)
    yield "localhost/base"


def pip_of_this_machine(folder: Path) -> list[str]:
    """Options that mount this machine's settings of pip, and what they name, while the image is built. None of it stays there."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    settings = {
        name.rpartition(".")[2]: value.strip("'") for name, _, value in (line.partition("=") for line in listed.splitlines())
    }
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
    words = [word for value in settings.values() for word in value.split()]
    # The pages of an index lead to files beside it.
    local = [Path(word.removeprefix("file://")).parent if word.startswith("file://") else Path(word) for word in words]
    mounts = {str(folder / "pip.conf"): "/etc/pip.conf"} | {
        str(each): str(each) for each in local if each.is_absolute() and each.exists()
    }
    return [word for here, there in mounts.items() for word in ("--volume", f"{here}:{there}:ro")]


@pytest.fixture(scope="module")
def container(buildah: Callable[..., str], base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A container of the image that is built of a copy of this tree, in which keys lie about."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("pip")
    for name in project_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    for name in PLANTED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(SECRET)
    buildah("build", "--build-arg", f"BASE={base}", *pip_of_this_machine(folder), "--tag", "entente:cpu", str(tree), timeout=3000)
    return buildah("from", "--pull-never", "localhost/entente:cpu").strip()


def test_the_image_holds_the_program_and_no_key(buildah: Callable[..., str], container: str):
    entente = Path(buildah("mount", container).strip()) / "entente"
    there = {path.name for path in entente.iterdir()}
    assert {*PACKAGES, "deploy", "models", ".venv"} <= there and not {"tests", "docs", ".git", "key.env"} & there
    assert list((entente / "runs").iterdir()) == [] and list((entente / ".prefect").iterdir()) == []
    found = subprocess.run(["grep", "-rl", SECRET, "--exclude-dir=.venv", entente], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    pip = entente.parent / "etc" / "pip.conf"
    assert not pip.exists() or pip.stat().st_size == 0
    assert entente.stat().st_uid == 0
    assert sorted(path.name for path in entente.rglob("*") if path.lstat().st_uid == 1000) == [".prefect", "runs"]
    buildah("umount", container)


def test_a_run_is_trained_in_the_image_by_a_user_without_rights(buildah: Callable[..., str], container: str, tmp_path: Path):
    def run(*words: str) -> str:
        return buildah("run", "--volume", f"{tmp_path}:/given:ro", container, "--", *words, timeout=1200)

    tmp_path.chmod(0o755)
    (tmp_path / "small.toml").write_text(SMALL_RUN)
    image = json.loads(buildah("inspect", "--type", "image", "entente:cpu"))
    assert image["OCIv1"]["config"]["Entrypoint"] == ["entente"] and run("id", "-u") == "1000\n"
    assert "2 steps" in run("entente", "train", "--config", "/given/small.toml", "--run", "mine")
    assert "mine" in run("entente", "runs")
    assert run("sh", "-c", "touch cli/mine 2>/dev/null || echo refused") == "refused\n", "the program is not its user's to change"
