"""A slow start is told, one that takes too long is cancelled, and nobody waits for an ended thread."""

import asyncio
import concurrent.futures
from collections.abc import Iterator

import pytest

from entente.inference import server_arguments
from entente.inference.host import EngineHost, start_engine
from entente.inference.settings import InferenceSettings
from entente.telemetry.errors import EngineError


@pytest.fixture
def own_host() -> Iterator[EngineHost]:
    host = EngineHost("slow")
    yield host
    host.close()


class Slow:
    """An engine that starts after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.cancelled = seconds, False

    async def start(self) -> None:
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_a_start_beyond_the_limit_is_cancelled(own_host: EngineHost, monkeypatch: pytest.MonkeyPatch):
    engine = Slow(600)
    monkeypatch.setattr(server_arguments, "START_S", 0.2)
    with pytest.raises(EngineError, match=r"did not start within 0.2 s$"):
        asyncio.run(start_engine(own_host, engine, InferenceSettings(engine="torch")))  # type: ignore[arg-type]
    own_host.submit(asyncio.sleep(0)).result(timeout=20)
    assert engine.cancelled


def test_a_start_that_takes_long_says_so(own_host: EngineHost, said: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_arguments, "computes_on_card", lambda settings: True)
    monkeypatch.setattr(server_arguments, "engine_family", lambda settings: "vllm")
    asyncio.run(start_engine(own_host, Slow(0.35), InferenceSettings(), say_every_s=0.1))  # type: ignore[arg-type]
    assert said and all("still starting after" in line and "CUDA graphs" in line for line in said)


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
