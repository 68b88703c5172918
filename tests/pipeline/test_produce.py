"""A producer plays its share of each version under its own name, loses no row that it can keep, and ends when told to."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pipeline import produce as module
from pipeline import rollout_side
from pipeline.gathering import PlayedGroups
from pipeline.produce import Produced, play_stretch_of, produce
from records.policy_version import PolicyVersion
from storage.adapters import read_adapter
from storage.asking import connect
from storage.control import ControlDesk, read_control, read_producer, read_producers
from storage.program import program_marks
from storage.runs import RunPaths
from telemetry.errors import InputError

QUOTA = 3


class Played:
    """A copy of the small run at work, producers that play for it, and what the test says meanwhile."""

    def __init__(self, first: RunPaths, root: Path) -> None:
        root.mkdir()
        for shared in ("_models", "_state_cache"):
            (root / shared).symlink_to(first.root.parent / shared)
        self.paths = RunPaths(root / "mine")
        shutil.copytree(first.root, self.paths.root)
        self.paths.summary.unlink()
        self.settings(deterministic=False)
        self.desk = self.train()

    def train(self, quota: int = QUOTA) -> ControlDesk:
        """Begin or resume the training, as far as producers see."""
        before = read_control(self.paths)
        desk = ControlDesk(self.paths, base_model=before.base_model, plays=before.plays, quota=quota, max_policy_lag=2)
        desk.serve(PolicyVersion(version=0, adapter=None, adapter_hash="base"))
        return desk

    def settings(self, **pipeline: Any) -> None:
        told = json.loads(self.paths.settings.read_bytes())
        told["pipeline"] |= pipeline
        self.paths.settings.write_text(json.dumps(told))

    def run(self, *said: Callable[[], Any], producer: str = "x", play: Any = play_stretch_of) -> Produced:
        """Play; whenever the producer has nothing to do, the next thing is said."""

        async def both() -> Produced:
            playing = asyncio.create_task(produce(self.paths, producer=producer, play=play))
            for say in said:
                await self.rests(producer, playing)
                await asyncio.to_thread(say)
            return await playing

        return asyncio.run(both())

    async def rests(self, producer: str, playing: "asyncio.Task[Any]") -> None:
        def settled(status: Any) -> bool:
            idle = status.state == "waiting" and status.version == self.desk.control.version
            return idle and bool(status.published or status.in_flight) and status.next_group % QUOTA == 0

        await self.until(producer, settled, playing)

    async def until(self, producer: str, done: Callable[[Any], bool], playing: "asyncio.Task[Any]") -> None:
        for _ in range(600):
            await asyncio.sleep(0.05)
            status = await asyncio.to_thread(read_producer, self.paths, producer)
            if (status is not None and done(status)) or playing.done():
                return
        raise AssertionError(f"it does not come about: {read_producer(self.paths, producer)}")

    def serve(self, version: int) -> None:
        self.desk.serve(read_adapter(self.paths, version))

    def rows(self) -> list[tuple[str, int, int]]:
        with connect(self.paths.root) as sql:
            told = "select distinct producer, start_group, policy_version from decisions where producer <> 'local' order by all"
            return sql.sql(told).fetchall()

    def shards(self, producer: str = "x") -> list[str]:
        folder = self.paths.shards / producer
        return sorted(file.name for file in folder.glob("*.arrow") if not file.name.endswith(".plies.arrow"))


@pytest.fixture
def played(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uniform_engine: Any) -> Played:
    monkeypatch.setattr(rollout_side, "make_engine", lambda settings, model: uniform_engine())
    monkeypatch.setattr(module, "FOLLOW_S", 0.1)
    monkeypatch.setattr(module, "apply_threads", lambda threads: None)
    _, first, _ = trained
    return Played(first, tmp_path / "runs")


def test_it_plays_its_share_of_each_version_and_ends_with_the_run(played: Played):
    done = played.run(lambda: played.serve(1), lambda: played.desk.stop("its training has ended"))
    assert played.rows() == [("x", group, 0 if group < QUOTA else 1) for group in range(2 * QUOTA)]
    assert done.start_groups == 2 * QUOTA and done.decisions > 0 and done.why == "its training has ended"
    (status,), damaged = read_producers(played.paths)
    assert (status.state, status.published, status.in_flight, damaged) == ("ended", 2 * QUOTA, 0, [])
    assert status.sentence == "its training has ended"


def test_another_life_goes_on_with_its_own_numbers(played: Played):
    played.run(lambda: played.desk.stop("over"))
    played.desk = played.train()
    played.serve(1)
    done = played.run(lambda: played.desk.dismiss(["x"]))
    assert played.rows() == [("x", group, 0 if group < QUOTA else 1) for group in range(2 * QUOTA)]
    assert done.why == "the run needs fewer producers"
    status = read_producer(played.paths, "x")
    assert status is not None and status.published == 2 * QUOTA, "over both its lives"


def test_a_run_that_nobody_trains_any_more_is_left_after_a_while(played: Played, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "IDLE_S", 0.5)
    assert "control file has not changed for" in played.run().why


def test_shards_wait_while_there_are_start_groups_to_spare_and_come_at_once_when_a_step_waits(played: Played):
    played.settings(groups_per_task=1)
    played.desk.ask(quota=QUOTA, gather=True)

    def waits() -> None:
        assert played.shards() == [] and played.rows() == []
        status = read_producer(played.paths, "x")
        assert status is not None and status.in_flight == QUOTA, "the trainer knows that they will come"
        played.desk.ask(quota=2 * QUOTA, gather=False)

    def goes_on() -> None:
        until = time.monotonic() + 30
        while (status := read_producer(played.paths, "x")) is None or status.next_group < 2 * QUOTA:
            assert time.monotonic() < until, status
            time.sleep(0.05)

    played.run(waits, goes_on, lambda: played.desk.stop("over"))
    assert played.shards()[0] == "000000.arrow" and "000001.arrow" not in played.shards(), "those that waited are one shard"
    assert "000003.arrow" in played.shards(), "after that each comes alone"
    assert [group for _, group, _ in played.rows()] == list(range(2 * QUOTA))


def test_what_waits_for_its_shard_is_published_when_the_producer_is_told_to_end(played: Played):
    played.desk.ask(quota=QUOTA, gather=True)

    async def run() -> None:
        playing = asyncio.create_task(produce(played.paths, producer="x"))
        await played.rests("x", playing)
        assert played.shards() == []
        playing.cancel()  # as SIGTERM does
        await asyncio.gather(playing, return_exceptions=True)
        assert playing.cancelled()

    asyncio.run(run())
    assert [group for _, group, _ in played.rows()] == list(range(QUOTA))
    status = read_producer(played.paths, "x")
    assert status is not None and (status.state, status.published, status.sentence) == ("ended", QUOTA, "it was cancelled")


def test_a_producer_that_fails_again_and_again_ends_with_what_it_failed_with(
    played: Played, monkeypatch: pytest.MonkeyPatch, uniform_engine: Any
):
    played.desk.ask(quota=100, gather=False)
    monkeypatch.setattr(rollout_side, "make_engine", lambda settings, model: uniform_engine(fails=lambda request: True))
    with pytest.raises(Exception, match="forks failed"):
        played.run()
    status = read_producer(played.paths, "x")
    assert status is not None and status.state == "ended" and "forks failed" in status.sentence and played.rows() == []


def test_a_folder_that_is_away_for_a_while_costs_time_and_no_row(played: Played, monkeypatch: pytest.MonkeyPatch):
    """Publishing and the status file fail three times each; nothing is played twice."""
    away, begun = {"publish_groups": 3, "update": 3}, []

    def often(name: str, whole: Any) -> Any:
        async def fails(*given: Any, **named: Any) -> Any:
            if (name != "update" or given[1] == "playing") and away[name] > 0:
                away[name] -= 1
                raise OSError(5, "no answer", "elsewhere")
            return await whole(*given, **named)

        return fails

    monkeypatch.setattr(module, "publish_groups", often("publish_groups", module.publish_groups))
    monkeypatch.setattr(module.ProducerDesk, "update", often("update", module.ProducerDesk.update))

    async def play(side: Any, producer: str, first: int, count: int) -> PlayedGroups:
        begun.append((first, count))
        return await play_stretch_of(side, producer, first, count)

    played.run(lambda: played.desk.stop("over"), play=play)
    assert away == {"publish_groups": 0, "update": 0}
    assert [group for _, group, _ in played.rows()] == list(range(QUOTA))
    assert sorted(begun) == sorted(set(begun)) and sum(count for _, count in begun) == QUOTA


def altered(played: Played, **changes: Any) -> None:
    played.paths.control.write_text(json.dumps(asdict(played.desk.control) | changes))


def other_program() -> list[str]:
    return ["schema of rows=2", *(mark if not mark.startswith("room game") else "room game=abcd" for mark in program_marks()[1:])]


@pytest.mark.parametrize(
    "spoil, kind, said",
    [
        (lambda run: run.desk.stop("its training has ended"), InputError, r"is not training \(its training has ended\)"),
        (lambda run: altered(run, pid=2**22 + 1), InputError, "its process 4194305 on this machine has ended; resume it"),
        (lambda run: run.settings(deterministic=True), InputError, r"resume it with --pipeline.no-deterministic"),
        (lambda run: altered(run, program=other_program()), InputError, r"schema of rows is \d+ here and 2 there, room game is"),
    ],
    ids=["ended", "killed", "deterministic", "program"],
)
def test_what_a_producer_cannot_play_for_is_one_sentence(
    played: Played, spoil: Callable[[Played], Any], kind: Any, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "IDLE_S", 0.5)  # one that plays all the same ends
    spoil(played)
    with pytest.raises(kind, match=said) as caught:
        asyncio.run(produce(played.paths, producer="x"))
    assert "\n" not in str(caught.value)
    assert not (played.paths.shards / "x").exists()
