"""A slow start is told, one that takes too long is ended with its processes, and nobody waits for an ended thread."""

import asyncio
import concurrent.futures
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from inference import start_engine as module
from inference.host import EngineHost
from inference.settings import InferenceSettings
from inference.start_engine import start_engine, start_limit_s
from telemetry.errors import EngineError


@pytest.fixture
def own_host() -> Iterator[EngineHost]:
    host = EngineHost("slow")
    yield host
    host.close()


def stubborn() -> None:
    """A child that does not end when it is asked to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


class Blocking:
    """An engine whose start blocks its thread until its child process ends, as vLLM's does."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.child: Any = multiprocessing.get_context("spawn").Process(target=stubborn, daemon=True)

    async def start(self) -> None:
        self.child.start()
        self.started.set()
        self.child.join()
        raise EngineError("its core ended")


class Slow:
    """An engine that starts after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def start(self) -> None:
        await asyncio.sleep(self._seconds)


@pytest.mark.system
def test_a_start_beyond_the_limit_is_ended_with_the_processes_that_it_made(own_host: EngineHost, monkeypatch: pytest.MonkeyPatch):
    engine = Blocking()
    monkeypatch.setattr(module, "START_S", 1.5)
    with pytest.raises(EngineError, match=r"did not start within 1.5 s$"):
        asyncio.run(start_engine(own_host, engine, InferenceSettings(engine="torch")))  # type: ignore[arg-type]
    engine.child.join(timeout=20)
    assert engine.child.exitcode is not None, "its child lives on, and closing the host would wait for it"


def test_a_start_that_takes_long_says_so(own_host: EngineHost, said: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "computes_on_card", lambda settings: True)
    monkeypatch.setattr(module, "engine_family", lambda settings: "vllm")
    asyncio.run(start_engine(own_host, Slow(0.35), InferenceSettings(), say_every_s=0.1))  # type: ignore[arg-type]
    assert said and all("still starting after" in line and "records CUDA graphs" in line for line in said)


@pytest.mark.parametrize(
    ("settings", "on_card", "limit"),
    [
        pytest.param({}, False, 300, id="CPU"),
        pytest.param({}, True, 1800, id="card"),
        pytest.param({"enforce_eager": "on"}, True, 300, id="card without graphs"),
        pytest.param({"urls": ["http://elsewhere:1"]}, False, 1800, id="workers, which may compile"),
    ],
)
def test_the_limit_leaves_a_cold_compilation_its_time(monkeypatch: pytest.MonkeyPatch, settings: dict, on_card: bool, limit: int):
    monkeypatch.setattr(module, "computes_on_card", lambda settings: on_card)
    monkeypatch.setattr(module, "engine_family", lambda settings: "vllm")
    assert start_limit_s(InferenceSettings.model_validate(settings)) == limit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_to_exit_that_is_raised_in_the_thread_ends_what_else_waits_there():
    host = EngineHost()

    async def leave() -> None:
        raise SystemExit(1)

    waiting = host.submit(asyncio.sleep(3600))
    leaving = host.submit(leave())
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(timeout=20)
    with pytest.raises((SystemExit, concurrent.futures.CancelledError)):
        leaving.result(timeout=20)
    host._thread.join(timeout=20)
    host.close()
