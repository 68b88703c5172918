"""Rollouts are played from a run's folder alone, under the version that its control file names."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from entente.rollouts.groups import play_missing
from entente.settings.layers import settings_of
from entente.telemetry.errors import DataError, EngineError, InputError
from state_cache.sampling import sample_start_positions
from storage.control import read_control
from storage.files import durable_write
from storage.run_sql import connect
from storage.runs import RunPaths
from tasks import rollout_worker
from tasks.rollout_worker import RolloutWorker


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, uniform_engine: Any) -> None:
    """Everything is real but the drawing."""
    monkeypatch.setattr(rollout_worker, "make_engine", lambda settings, model: uniform_engine())


def test_a_side_follows_the_run_and_its_rows_are_of_the_version_it_serves(run, serve):
    paths, desk = run()

    async def play() -> None:
        side = await RolloutWorker.open(paths.root)
        try:
            for group, version in enumerate((0, 1, 2)):
                serve(paths, desk, version)
                await side.follow()
                positions = sample_start_positions(side.resources.cache.train, 1, 0, group)
                await play_missing(side.resources, "rollout", "x", positions, group, side.resources.rollouts)
        finally:
            await side.close()

    asyncio.run(play())
    with connect(paths.root) as sql:
        told = sql.sql("select distinct start_group, policy_version from decisions where producer = 'x' order by all").fetchall()
    assert told == [(0, 0), (1, 1), (2, 2)]


def test_requests_with_trouble_are_told_once():
    counts = {"retries": 2, "ejections": 1}
    resources: Any = SimpleNamespace(engine=SimpleNamespace(events=lambda: counts))
    nothing: Any = None
    side = RolloutWorker(resources, nothing, nothing)
    assert side.take_troubles() == {"engine/retries": 2.0}
    counts = {"retries": 3, "ejections": 1}
    assert side.take_troubles() == {"engine/retries": 1.0}


def test_what_a_side_still_plays_when_its_run_is_started_again_is_not_published_there(run):
    """The flow was killed: a run of its name with the same settings may have other weights under the same numbers."""
    paths, _ = run()

    async def play() -> None:
        side = await RolloutWorker.open(paths.root)
        try:
            durable_write(paths.settings, paths.settings.read_bytes())
            positions = sample_start_positions(side.resources.cache.train, 1, 0, 0)
            with pytest.raises(EngineError, match="was removed or started again meanwhile"):
                await play_missing(side.resources, "rollout", "x", positions, 0, side.resources.rollouts)
        finally:
            await side.close()

    asyncio.run(play())
    assert not (paths.shards / "x").exists()


def altered(paths: RunPaths, **changes: Any) -> None:
    told = json.loads(paths.control.read_bytes()) | changes
    paths.control.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "spoil, kind, said",
    [
        (lambda paths: paths.settings.unlink(), InputError, "there is no run in"),
        (lambda paths: altered(paths, program=["room game=0"]), InputError, "by another version of the program: .*room game is"),
        (lambda paths: altered(paths, base_model="0123456789abcdef"), InputError, "copy the same model"),
        (lambda paths: altered(paths, plays="other"), InputError, "other settings"),
        (lambda paths: altered(paths, version=1, adapter_hash="other"), DataError, "not the adapter"),
        (lambda paths: (paths.root.parent / "_models").unlink(), InputError, "is gone from this machine: restore it"),
    ],
    ids=["no run", "program", "model", "plays", "hash", "no model"],
)
def test_what_cannot_be_played_for_is_one_sentence(run, spoil: Callable[[RunPaths], Any], kind: type[Exception], said: str):
    paths, _ = run()
    spoil(paths)
    with pytest.raises(kind, match=said) as caught:
        asyncio.run(RolloutWorker.open(paths.root))
    assert "\n" not in str(caught.value)


def test_the_hash_of_what_is_played_holds_what_shapes_rows_and_nothing_else(run):
    paths, _ = run()
    settings = settings_of(paths)
    same = settings.model_copy(update={"run": "another", "inference": settings.inference.model_copy(update={"urls": ("u",)})})
    other = settings.model_copy(update={"rollouts": settings.rollouts.model_copy(update={"horizon_years": 9})})
    assert settings.plays == same.plays == read_control(paths).plays != other.plays
