"""The doctor finds what would stop a run, in environments that lack or hide something."""

import json
import socket
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from entente.cli.doctor import HOME, check_run, check_size, check_versions, declared, verdict
from entente.settings import find_model
from entente.settings.layers import layered_settings
from entente.telemetry import cards
from tests.command import Entente
from tests.telemetry.fake_nvml import card


@pytest.fixture
def problems(entente) -> Callable[..., dict[str, str]]:
    """Name -> sentence of each problem that `entente doctor` finds; each has a cure."""

    def run(*words: str) -> dict[str, str]:
        done = entente("doctor", "--json", *words)
        found = json.loads(done.stdout)
        wrong = [each for each in found["checks"] if each["state"] == "problem"]
        assert (done.stderr, done.returncode, found["ok"]) == ("", 1 if wrong else 0, not wrong)
        assert all(each["cure"] for each in wrong)
        return {each["name"]: each["sentence"] for each in wrong}

    return run


def test_a_sound_environment_is_ready_and_nothing_is_written(entente):
    done = entente("doctor")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.splitlines()[-1].startswith("ready")
    assert list(entente.folder.iterdir()) == []


def test_a_long_path_is_shown_whole(entente):
    folder = "/proc/" + "long/" * 30
    assert folder.rstrip("/") in "".join(entente("doctor", "--runs-root", folder).stdout.split())


def test_a_python_without_docstrings_is_told(entente):
    done = entente.process("doctor", "--json", PYTHONOPTIMIZE="2")
    (found,) = (each for each in json.loads(done.stdout)["checks"] if each["state"] == "problem")
    assert (done.returncode, found["name"], found["cure"]) == (1, "Python", "unset PYTHONOPTIMIZE, or set it to 1")


def test_packages_that_do_not_fit_are_named(problems, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fastapi-0.138.0.dist-info").mkdir()
    (tmp_path / "fastapi-0.138.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fastapi\nVersion: 0.138.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "fastapi 0.138.0 is installed, but fastapi>=0.139" in problems()["versions"]


def test_a_transformers_that_cannot_fetch_a_gguf_does_not_fit():
    _, requirements = declared()
    (requirement,) = (each for each in requirements if each.startswith("transformers"))
    _, versions = check_versions({"transformers": "5.16.0"}, ">=3.11", [requirement])
    assert versions.sentence.startswith("transformers 5.16.0 is installed, but")


def test_the_folder_of_runs_that_a_file_names_is_checked(problems, tmp_path: Path):
    (tmp_path / "mine.toml").write_text('runs_root = "/proc/runs"')
    assert "cannot write in '/proc'" in problems("--config", str(tmp_path / "mine.toml"))["runs"]


def test_a_run_that_would_be_refused_is_told(problems, tmp_path: Path):
    (tmp_path / "huge.toml").write_text("[inference]\nengine = 'vllm'\nkv_cache_gib = 9999\n")
    assert "lower inference.kv_cache_gib from 9999 to" in problems("--config", str(tmp_path / "huge.toml"))["run"]
    other = f"[inference]\nmodel = '{HOME}/models/whole-192'\n[prompts]\nown_line = 'last'\n"
    (tmp_path / "other.toml").write_text(other)
    assert "was made for prompts.own_line 'in_place'" in problems("--config", str(tmp_path / "other.toml"))["run"]


def test_a_dask_scheduler_that_a_run_would_miss_is_told_here_and_by_a_dry_run(problems, entente, tmp_path: Path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        (tmp_path / "dask.toml").write_text(
            f"[pipeline]\ntask_runner = 'dask'\ndask_address = '127.0.0.1:{nobody.getsockname()[1]}'\n"
        )
        words = ["--config", str(tmp_path / "dask.toml")]
        assert "no Dask scheduler answers at" in problems(*words)["Dask"]
        planned = entente("train", "--dry-run", *words)
    assert planned.returncode == 2 and "no Dask scheduler answers at" in planned.stderr


@pytest.mark.parametrize("preset", ["gpu-24", "lm"])
def test_a_model_that_is_neither_here_nor_at_the_hub_is_told_in_the_words_of_the_run(
    entente, problems, monkeypatch: pytest.MonkeyPatch, preset: str
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wrong, refused = problems("--preset", preset), entente("train", "--preset", preset, "--dry-run")
    assert refused.returncode == 2 and list(wrong) == ["model"] and wrong["model"] in refused.stderr


@pytest.mark.parametrize(
    ("folder", "name", "sentence"),
    [
        pytest.param("gone", "runs", "is a link to", id="runs on a disk that is not mounted"),
        pytest.param("/proc/runs", "runs", "cannot write in '/proc'", id="runs where nobody can write"),
        pytest.param("what?/home", "Prefect", "because a '?'", id="a folder whose name ends the database's address"),
        pytest.param("gone/home", "Prefect", "is a link to", id="Prefect's home on a disk that is not mounted"),
    ],
)
def test_a_folder_in_which_a_run_would_fail_is_told(tmp_path: Path, folder: str, name: str, sentence: str):
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    given = {"runs": "runs", "Prefect": "home"} | {name: folder}
    done = Entente(tmp_path, PREFECT_HOME=given["Prefect"])("doctor", "--runs-root", given["runs"], "--json")
    (found,) = (each for each in json.loads(done.stdout)["checks"] if each["state"] == "problem" and each["name"] != "disk")
    assert found["name"] == name and sentence in found["sentence"] and found["cure"]


def test_a_server_that_a_file_of_prefect_names_is_asked(problems, entente):
    (entente.folder / "prefect.toml").write_text('[api]\nurl = "http://127.0.0.1:9/api"\n')
    assert "no Prefect server answers at http://127.0.0.1:9/api" in problems()["Prefect"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("ALL_PROXY", "socks4://127.0.0.1:9", id="a proxy of a kind that needs more, or that nothing supports"),
        pytest.param("SSL_CERT_FILE", "/nowhere.pem", id="no such certificates"),
    ],
)
def test_a_proxy_or_certificate_with_which_a_run_would_fail_is_told(tmp_path: Path, name: str, value: str):
    done = Entente(tmp_path, **{name: value})("doctor", "--json")
    (found,) = (each for each in json.loads(done.stdout)["checks"] if each["state"] == "problem")
    assert found["name"] == "Prefect" and "proxy or certificate" in found["sentence"]


def test_requirements_of_extras_and_other_platforms_count_only_where_they_apply():
    wanted = ["numpy>=99", "nowhere-at-all", "dask>=99; extra == 'dask'", "x; sys_platform == 'win32'"]
    python, versions = check_versions({"numpy": "2.0"}, ">=3.99", wanted)
    assert (python.state, versions.state) == ("problem", "problem") and "this needs >=3.99" in python.sentence
    assert versions.sentence == (
        "numpy 2.0 is installed, but numpy>=99 is needed; no nowhere-at-all is installed, but nowhere-at-all is needed"
    )


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10 * 2**20))
    (full,) = [each for each in check_size(tmp_path / "none" / "yet") if each.name == "disk"]
    assert verdict([full]) == "not ready: 1 problem would stop a run"


@pytest.mark.parametrize(
    ("driver", "path", "cuda", "names"),
    [
        pytest.param("550.54", None, (13, 0), {"CUDA"}, id="an old driver"),
        pytest.param("580.82", "", (13, 0), {"compiler"}, id="no compiler"),
        pytest.param("580.82", None, None, {"CUDA"}, id="a trainer's torch for the CPU"),
        pytest.param("580.82", None, (13, 0), set(), id="ready"),
    ],
)
def test_a_card_that_cannot_compute_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str, path: str | None, cuda: tuple[int, int] | None, names: set
):
    monkeypatch.setattr(cards, "visible_cards", lambda: (replace(card(0), driver=driver),))
    monkeypatch.setattr(cards, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(find_model, "check_room", lambda *_, **__: None)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    (tmp_path / "cc").write_text("")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if path is None else path)
    found = check_run(layered_settings("laptop", overrides={"runs_root": tmp_path / "runs"}))
    assert {each.name for each in found if each.state == "problem"} == names
