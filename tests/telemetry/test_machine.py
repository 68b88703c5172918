"""Claims about the record of where something ran."""

import importlib.metadata
import json
import platform
import subprocess
import sys
import time

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
