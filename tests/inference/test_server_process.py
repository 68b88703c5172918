"""A server that a run starts answers with a key of its own and ends when the run does; a small HTTP server stands for vLLM."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from entente.inference.server_process import ServerProcess
from entente.telemetry.errors import EngineError
from tests.telemetry.test_child import ROOT, is_gone

FAKE = """
import os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
port, mode = int(sys.argv[1]), sys.argv[2]
print("loading weights", flush=True)
if mode == "dies":
    sys.exit("no such model")
if mode == "hangs":
    time.sleep(600)
core = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        text = f"{core.pid} {os.environ['FAKE_KEY']} {os.environ['ADDED']} {' '.join(sys.argv)}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *rest):
        pass
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., ServerProcess]:
    """`fake("serves")`: a server, not started yet."""
    (tmp_path / "fake_server.py").write_text(FAKE)

    def make(mode: str) -> ServerProcess:
        environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "ADDED": "yes"}
        return ServerProcess(
            Path(sys.executable),
            "fake_server",
            lambda port: [str(port), mode],
            environment,
            key_variable="FAKE_KEY",
            log=tmp_path / "logs" / "vllm.log",
        )

    return make


def read(server: ServerProcess) -> list[str]:
    with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
        return answer.read().decode().split()


def test_a_server_answers_with_its_key_which_no_argument_shows_and_ends_with_what_it_started(fake, tmp_path: Path):
    async def play() -> tuple[list[str], int, str]:
        server = fake("serves")
        await server.start(limit_s=60)
        try:
            arguments = Path(f"/proc/{server.pid}/cmdline").read_text()
            return await asyncio.to_thread(read, server), server.pid, arguments.replace(server.key, "KEY SHOWN")
        finally:
            await server.close()
            await server.close()

    (core, key, added, *_), pid, arguments = asyncio.run(play())
    assert len(key) > 30 and added == "yes" and "KEY SHOWN" not in arguments
    assert is_gone(pid) and is_gone(int(core))
    assert "loading weights" in (tmp_path / "logs" / "vllm.log").read_text()


def test_two_servers_have_keys_and_ports_of_their_own(fake):
    one, other = fake("serves"), fake("serves")
    assert one.key != other.key and one.url != other.url


@pytest.mark.parametrize(
    ("mode", "sentence"), [("dies", "(?s)ended with exit code 1.*no such model"), ("hangs", "(?s)within 1 s.*loading weights")]
)
def test_a_start_that_fails_says_why_and_leaves_no_process(fake, mode: str, sentence: str):
    server = fake(mode)
    ended = []

    async def play() -> None:
        try:
            await server.start(limit_s=20 if mode == "dies" else 1)
        finally:
            ended.append(server.end.done())

    with pytest.raises(EngineError, match=sentence):
        asyncio.run(play())
    assert ended == [True]


def test_a_start_that_is_cancelled_ends_its_server(fake):
    server, pids = fake("hangs"), []

    async def play() -> None:
        start = asyncio.ensure_future(server.start(limit_s=60))
        while not server.pid:
            await asyncio.sleep(0.02)
        pids.append(server.pid)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)

    asyncio.run(play())
    assert is_gone(pids[0])


def test_a_killed_server_is_noticed_and_what_it_started_is_ended_too(fake):
    async def play() -> tuple[int, str]:
        server = fake("serves")
        await server.start(limit_s=60)
        core, *_ = await asyncio.to_thread(read, server)
        os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.wait_for(asyncio.shield(server.end), 20) == -signal.SIGKILL
        ending = server.ending()
        await server.close()
        return int(core), ending

    core, ending = asyncio.run(play())
    assert is_gone(core) and ending.startswith("by SIGKILL; ")


def test_a_server_ends_when_its_parent_is_killed(fake, tmp_path: Path):
    fake("serves")  # writes the module
    seen = tmp_path / "seen"
    parent = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom entente.inference.server_process import ServerProcess\n"
        f"server = ServerProcess(Path(sys.executable), 'fake_server', lambda port: [str(port), 'serves'], {{'ADDED': ''}}, "
        "key_variable='FAKE_KEY', "
        f"log=Path({str(tmp_path / 'log')!r}))\n"
        "async def play():\n    await server.start(limit_s=60)\n"
        f"    Path({str(seen)!r}).write_text(f'{{server.pid}} {{server.url}}')\n    await asyncio.sleep(600)\n"
        "asyncio.run(play())"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", parent], env=environment) as process:
        while not (seen.is_file() and " http" in seen.read_text()):
            assert process.poll() is None
        pid, url = seen.read_text().split()
        with urllib.request.urlopen(url, timeout=10) as answer:
            core = answer.read().decode().split()[0]
        process.send_signal(signal.SIGKILL)
    assert is_gone(int(pid)) and is_gone(int(core))
