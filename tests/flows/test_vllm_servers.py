"""A run over two stock vLLM servers, one of which is killed: no row is lost or doubled, and the trainer agrees with both."""

import contextlib
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entente.inference.engine_cards import check_vllm
from entente.inference.page_gate import KEY_OF_SERVER
from entente.inference.server_arguments import MODULE, server_arguments, server_environment
from entente.inference.server_process import free_port
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from storage.runs import RunPaths
from tests.command import Entente
from tests.flows.test_scale_out import wait
from tests.shard_rows import read_rows, shard_files

pytestmark = [pytest.mark.vllm, pytest.mark.system]
KEY = "a key of both servers"
STEPS = 8
"""Enough that a server is killed while much of the run is still to come."""
SETTINGS = InferenceSettings(engine="vllm", max_model_length=1024, max_sequences=32, threads=1)


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def status_for(port: int, **headers: str) -> int:
    """HTTP status of the server's answer to one who has the key."""
    address = f"http://127.0.0.1:{port}/v1/models"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {KEY}", **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as refusal:
        return refusal.code


@pytest.fixture
def servers(small_model: Path, tmp_path: Path) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Two servers that somebody else started, by port."""
    vllm = check_vllm()
    started: dict[int, subprocess.Popen[bytes]] = {}
    environment = os.environ | server_environment(SETTINGS) | vllm.variables() | {KEY_OF_SERVER: KEY}
    try:
        for _ in range(2):
            port = free_port()
            command = [vllm.python, "-P", "-m", MODULE, *server_arguments(small_model, SETTINGS, host="127.0.0.1", port=port)]
            with (tmp_path / f"{port}.log").open("wb") as log:
                started[port] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        for port in started:
            wait(300, f"vLLM at {port}", lambda port=port: is_ready(port), *started.values())
        yield started
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def sampled_by(paths: RunPaths) -> set[str]:
    """The servers that drew rows."""
    return {row["worker"] for row in read_rows(*shard_files(paths)) if row["worker"]}


@pytest.mark.in_turn
def test_a_run_over_two_vllm_servers_loses_and_doubles_nothing_when_one_is_killed(
    workplace: Any, servers: dict[int, subprocess.Popen[bytes]], prefect_server: str
):
    keyed = Entente(workplace.folder, **{"PREFECT_API_URL": prefect_server, KEY_VARIABLE: KEY})
    paths, urls = RunPaths(workplace.folder / "runs" / "by-url"), [f"http://127.0.0.1:{port}" for port in servers]
    for port in servers:
        assert status_for(port) == 200 and status_for(port, Origin="http://elsewhere.example") == 403
    words = ("train", "--config", "small.toml", "--run", "by-url", "--steps", str(STEPS), "--json")
    with keyed.start(*words, *(word for url in urls for word in ("--inference.urls", url))) as process:
        try:
            # Positions choose servers by their ports, so the first rows may be either server's.
            killed = wait(300, "rows of a server", lambda: next(iter(sampled_by(paths)), None), process)
            os.killpg(servers[int(killed.rpartition(":")[2])].pid, signal.SIGKILL)
            out, err = process.communicate(timeout=400)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["steps"] == STEPS and summary["orders_rejected"] == 0
    rows = read_rows(*shard_files(paths))
    assert len({row["decision_id"] for row in rows}) == len(rows) > 0
    assert len(sampled_by(paths)) == 2
    figures = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert figures[0]["mismatch/largest"] <= 1e-4
    assert sum(step.get("engine/ejections", 0) for step in figures) >= 1
    assert "gets no more work" in err
