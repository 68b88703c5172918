"""A producer's status file says that it is alive, also while its process is busy."""

import asyncio
import time
from pathlib import Path

import pytest

from pipeline import producer_desk
from pipeline.producer_desk import ProducerDesk
from storage.control import read_producer
from storage.runs import RunPaths


def test_it_gives_signs_of_life_while_its_event_loop_stands_still_as_when_a_large_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(producer_desk, "BEAT_S", 0.02)
    paths = RunPaths(tmp_path / "run").create()

    def alive_at() -> float:
        status = read_producer(paths, "x")
        assert status is not None
        return status.alive_at

    async def stand_still() -> None:
        async with ProducerDesk(paths, "x", ""):
            before, until = alive_at(), time.monotonic() + 10
            while alive_at() == before and time.monotonic() < until:
                time.sleep(0.02)  # not asyncio's
            assert alive_at() > before

    asyncio.run(stand_still())
    ended = read_producer(paths, "x")
    assert ended is not None and ended.state == "ended"
