"""Both locks have the same direct pins, and the one for cards still resolves."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.check_gpu.lock import CPU_LOCK, GPU_LOCK, PYTHONS, ROOT, direct_names, joined, lacking, read_lock, shared_pins
from telemetry.errors import EntenteError

UV = "uv==0.13.9"


def test_what_the_project_asks_for_has_one_version_in_both_locks():
    pins, gpu = shared_pins(), read_lock(GPU_LOCK)
    assert {name: str(gpu[name].specifier) for name in pins} == {name: f"=={version}" for name, version in pins.items()}
    assert {"torch", "vllm", "prefect", "fastapi", "diplomacy", "pytest", "prefect-dask", "pip", "hatchling"} <= pins.keys()
    unlocked = set(direct_names(tomllib.loads((ROOT / "pyproject.toml").read_text()))) - set(read_lock(CPU_LOCK))
    assert unlocked == set()


def test_the_lock_names_no_index_no_folder_and_no_cpu_build():
    text = GPU_LOCK.read_text()
    pins = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r'[a-z0-9.-]+==[A-Za-z0-9.]+( ; python_version >= "3\.1\d")?', line)] == []
    assert pins == sorted(pins, key=lambda line: line.partition("==")[0]) and len(pins) > 280
    assert not re.search(r"https?:|file:|index-url|find-links", text)


def test_a_package_that_only_a_later_python_needs_has_a_marker_and_two_versions_are_refused():
    found = joined({"3.11": {"a": "1", "old": "1"}, "3.12": {"a": "1"}, "3.13": {"a": "1", "new": "2"}})
    assert found == ["a==1", 'new==2 ; python_version >= "3.13"', "old==1"]
    with pytest.raises(EntenteError, match=r"a would be 1 and, with Python 3\.12, 2: bound it in EXTRA_BOUNDS"):
        joined({"3.11": {"a": "1"}, "3.12": {"a": "2"}})


@pytest.mark.system
def test_the_lock_for_cards_resolves_on_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With a resolver of its own, from the index that pip is configured for; nothing of it is installed."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "uv"), UV]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the package index did not answer within two minutes")
    if done.returncode:
        pytest.skip(f"{UV} could not be loaded from the package index")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    named = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if index := os.environ.get("PIP_INDEX_URL") or named.stdout.strip():
        monkeypatch.setenv("UV_DEFAULT_INDEX", index)
    assert [pin for python in PYTHONS for pin in lacking(str(tmp_path / "uv" / "bin" / "uv"), python)] == []
