"""Rollouts are played from a run's folder alone, under the version that its control file names, and for a run that wants them."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipeline import rollout_side
from pipeline.play import play_missing
from pipeline.producer_desk import ProducerDesk, next_free_number
from pipeline.rollout_side import RolloutSide, side_settings
from pipeline.start_positions import producer_positions, start_positions
from rollouts.settings import RolloutSettings
from storage.asking import connect
from storage.control import ProducerStatus, read_control, read_producer, write_producer
from storage.runs import RunPaths
from storage.shards import shard_path
from telemetry.errors import DataError, InputError


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, uniform_engine: Any) -> None:
    """Everything is real but the drawing."""
    monkeypatch.setattr(rollout_side, "make_engine", lambda settings, model: uniform_engine())


def test_a_side_follows_the_run_and_its_rows_are_of_the_version_it_serves(run, serve):
    paths, desk = run()

    async def play() -> None:
        side = await RolloutSide.open(paths.root)
        try:
            for group, version in enumerate((0, 1, 2)):
                serve(paths, desk, version)
                await side.follow()
                assert side.version == version
                positions = producer_positions(side.resources, "x", group, 1, side.version)
                await play_missing(side.resources, "rollout", "x", positions, group)
        finally:
            await side.close()

    asyncio.run(play())
    with connect(paths.root) as sql:
        told = sql.sql("select distinct start_group, policy_version from decisions where producer = 'x' order by all").fetchall()
    assert told == [(0, 0), (1, 1), (2, 2)]


def test_a_version_is_taken_on_the_beat_while_games_are_played(run, serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollout_side, "FOLLOW_S", 0.05)
    paths, desk = run()

    async def wait() -> int:
        side = await RolloutSide.open(paths.root)
        try:
            await asyncio.to_thread(serve, paths, desk, 2)
            for _ in range(200):
                if side.version == 2:
                    break
                await asyncio.sleep(0.05)
            return side.version
        finally:
            await side.close()

    assert asyncio.run(wait()) == 2


def altered(paths: RunPaths, **changes: Any) -> None:
    told = json.loads(paths.control.read_bytes()) | changes
    paths.control.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "spoil, kind, said",
    [
        (lambda paths: paths.settings.unlink(), InputError, "there is no run in"),
        (lambda paths: altered(paths, base_model="0123456789abcdef"), InputError, "copy the same model"),
        (lambda paths: altered(paths, plays="other"), InputError, "other settings"),
        (lambda paths: altered(paths, version=1, adapter_hash="other"), DataError, "not the adapter"),
        (lambda paths: (paths.root.parent / "_models").unlink(), InputError, "share the whole runs folder"),
    ],
    ids=["no run", "model", "plays", "hash", "no model"],
)
def test_what_cannot_be_played_for_is_one_sentence(run, spoil: Callable[[RunPaths], Any], kind: type[Exception], said: str):
    paths, _ = run()
    spoil(paths)
    with pytest.raises(kind, match=said) as caught:
        asyncio.run(RolloutSide.open(paths.root))
    assert "\n" not in str(caught.value)


def test_producers_begin_elsewhere_than_the_flow_and_one_another_and_the_same_whenever_asked(run):
    paths, _ = run()

    async def draw() -> Any:
        side = await RolloutSide.open(paths.root)
        try:
            playing = side.resources
            playing.rollouts = RolloutSettings(start_groups=4, forks_per_group=2, horizon_years=1)
            whole = {name: producer_positions(playing, name, 0, 12, 0) for name in ("a", "b")}
            parts = producer_positions(playing, "a", 0, 3, 0) + producer_positions(playing, "a", 3, 9, 0)
            own = [position for step in (1, 2, 3) for position in start_positions(playing, step)]
            return whole, parts, own
        finally:
            await side.close()

    whole, parts, own = asyncio.run(draw())
    assert parts == whole["a"] and len(whole["a"]) == 12
    assert whole["a"] != whole["b"] != own != whole["a"]


def test_the_hash_of_what_is_played_holds_what_shapes_rows_and_nothing_else(run):
    paths, _ = run()
    settings = side_settings(paths)
    same = settings.model_copy(update={"run": "another", "inference": settings.inference.model_copy(update={"urls": ("u",)})})
    other = settings.model_copy(update={"rollouts": settings.rollouts.model_copy(update={"horizon_years": 9})})
    assert settings.plays == same.plays == read_control(paths).plays != other.plays


def test_a_number_is_never_used_twice_whatever_is_left_of_a_producer(run):
    paths, _ = run()
    assert next_free_number(paths, "x") == 0

    async def begin() -> ProducerStatus:
        async with ProducerDesk(paths, "x", "") as desk:
            await desk.update("playing", next_group=6, published=4)
            with pytest.raises(InputError, match="is at work on this machine"):
                async with ProducerDesk(paths, "x", ""):
                    raise AssertionError("two of one name")
            return desk.status

    asyncio.run(begin())
    assert next_free_number(paths, "x") == 6, "said, and perhaps played"
    ended = read_producer(paths, "x")
    assert ended is not None and ended.state == "ended" and ended.published == 4

    async def shard() -> None:
        side = await RolloutSide.open(paths.root)
        try:
            await play_missing(side.resources, "rollout", "x", producer_positions(side.resources, "x", 8, 2, 0), 8)
        finally:
            await side.close()

    asyncio.run(shard())
    assert next_free_number(paths, "x") == 10
    (paths.producers / "x.json").write_text("{")
    assert next_free_number(paths, "x") == 10, "from the shards alone"
    shard_path(paths, "x", 8).write_bytes(b"")
    assert next_free_number(paths, "x") > 10, "beyond whatever the damaged one held"


def test_a_producer_of_that_name_at_work_on_another_machine_is_respected(run):
    paths, _ = run()

    async def begin() -> None:
        async with ProducerDesk(paths, "x", ""):
            return

    asyncio.run(begin())
    status = read_producer(paths, "x")
    assert status is not None
    write_producer(paths, replace(status, state="playing", host="another-machine"))
    with pytest.raises(InputError, match="at work on another-machine"):
        asyncio.run(begin())
    write_producer(paths, replace(status, state="playing", host="another-machine", alive_at=status.alive_at - 3600))
    asyncio.run(begin())
