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
from entente.telemetry import control_groups, machine


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


def in_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    (tmp_path / "own").write_text(f"11:name=systemd:/\n3:cpuset:/\n{own}\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "OWN", tmp_path / "own")


def memory(limit: str, used: str, cache: str, folder: str = "") -> dict[str, str]:
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": f"inactive_file {cache}"}


def older(limit: str, used: str, cache: str, folder: str) -> dict[str, str]:
    stat = f"inactive_file 0\ntotal_inactive_file {cache}"
    return {
        f"{folder}memory.limit_in_bytes": limit,
        f"{folder}memory.usage_in_bytes": used,
        f"{folder}memory.stat": stat,
    }


UNLIMITED = "9223372036854771712"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param("0::/", memory("max", "5", "1"), 1000, id="no limit"),
        pytest.param("0::/", memory("500", "300", "100"), 300, id="a container"),
        pytest.param("0::/", memory("500", "600", "0"), 0, id="over its limit"),
        pytest.param("0::/job/step", memory("500", "300", "0", "job/step/"), 200, id="a group"),
        pytest.param("0::/job/step", memory("500", "300", "0", "job/") | memory("max", "300", "0", "job/step/"), 200, id="above"),
        pytest.param("0::/job/step", memory("90", "10", "0", "other/"), 1000, id="another's"),
        pytest.param("0::/../job", memory("500", "300", "0"), 200, id="outside the namespace"),
        pytest.param("4:memory:/", older(UNLIMITED, "300", "0", "memory/"), 1000, id="version 1, no limit"),
        pytest.param("4:memory:/docker/7", older("500", "300", "100", "memory/docker/7/"), 300, id="version 1"),
        pytest.param("4:memory:/docker/7", older("500", "300", "0", "memory/"), 200, id="version 1, seen as the root"),
    ],
)
def test_the_limits_of_memory_of_a_group_and_of_those_above_it_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], expected: int
):
    in_group(tmp_path, monkeypatch, own, files)
    assert control_groups.available_memory(1000) == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param("0::/", {"cpu.max": "max 100000"}, 8, id="no limit"),
        pytest.param("0::/", {"cpu.max": "250000 100000"}, 2, id="a part of a core is none"),
        pytest.param("0::/", {"cpu.max": "50000 100000"}, 1, id="less than a core"),
        pytest.param("0::/", {"cpu.max": "1600000 100000"}, 8, id="more than the machine has"),
        pytest.param("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 100000"}, 3, id="a group"),
        pytest.param("1:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8, id="1, no limit"),
        pytest.param("1:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2, id="1"),
    ],
)
def test_a_quota_of_cpu_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], expected: int
):
    in_group(tmp_path, monkeypatch, own, files)
    assert control_groups.allowed_cores(8) == expected


def test_the_doctor_shows_the_limits_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits = {"cpu.max": "100000 100000", "memory.max": "500", "memory.current": "300", "memory.stat": "inactive_file 0"}
    in_group(tmp_path, monkeypatch, "0::/", limits)
    assert (machine.usable_cores(), machine.free_memory()) == (1, 200)
    assert next(check_size(tmp_path)).sentence == "1 cores, 0.0 GiB of memory available"
