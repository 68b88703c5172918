"""The engine's thread: whatever ends it, nobody waits for ever."""

import asyncio
import concurrent.futures

import pytest

from inference.host import EngineHost


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
