"""Claims about the record of where something ran."""

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entente.cli.doctor import check_size
from entente.telemetry import machine


def test_versions_are_those_installed_and_every_value_is_a_text_for_json():
    found = machine.environment()
    assert found["duckdb"] == importlib.metadata.version("duckdb")
    assert found["python"] == platform.python_version()
    assert int(found["cpu_cores"]) >= 1 and found["gpus"]
    assert json.loads(json.dumps(found)) == found and all(isinstance(value, str) for value in found.values())


def test_a_package_that_is_not_installed_is_absent(monkeypatch):
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-thing", "duckdb"))
    found = machine.environment()
    assert found["no-such-thing"] == "absent" and found["duckdb"] == importlib.metadata.version("duckdb")


def test_cpu_seconds_count_processes_that_have_ended():
    before = machine.cpu_seconds()
    own = time.process_time()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert machine.cpu_seconds() - before - (time.process_time() - own) > 0.25


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 1"}, 1000, id="no limit"),
        pytest.param({"memory.max": "500", "memory.current": "300", "memory.stat": "inactive_file 100"}, 300, id="a limit"),
    ],
)
def test_a_container_s_limit_counts(tmp_path: Path, files: dict[str, str], expected: int):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert machine.available_memory(1000, tmp_path) == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        pytest.param("max 100000", 8, id="no limit"),
        pytest.param("250000 100000", 2, id="a part of a core is none"),
        pytest.param("50000 100000", 1, id="less than a core"),
        pytest.param("1600000 100000", 8, id="more than the machine has"),
    ],
)
def test_a_container_s_quota_of_cpu_time_counts(tmp_path: Path, quota: str, expected: int):
    (tmp_path / "cpu.max").write_text(quota)
    assert machine.allowed_cores(8, tmp_path) == expected


def test_the_doctor_shows_the_limits_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits = {"cpu.max": "100000 100000", "memory.max": "500", "memory.current": "300", "memory.stat": "inactive_file 0"}
    for name, content in limits.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert (machine.usable_cores(), machine.free_memory()) == (1, 200)
    assert next(check_size(tmp_path)).sentence == "1 cores, 0.0 GiB of memory available"
