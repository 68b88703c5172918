"""SIGTERM cancels a flow, also between two of its subflows."""

import asyncio
import os
import signal
import threading

import pytest

from flows.cancel_on_sigterm import cancelled_by_sigterm


def test_the_end_of_an_inner_block_leaves_the_outer_one_its_signal():
    assert threading.current_thread() is threading.main_thread(), "no other thread gets signals"

    async def work() -> None:
        with cancelled_by_sigterm():
            for _ in range(2):
                with cancelled_by_sigterm():
                    await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert signal.getsignal(signal.SIGTERM) == before
