"""A producer plays its share of each version under its own name, and ends when the run says so or is told to."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import produce_rollouts as flow_module
from flows.produce_rollouts import produce_rollouts
from pipeline import rollout_side
from records.policy_version import PolicyVersion
from storage.asking import connect
from storage.control import ControlDesk, read_control, read_producer, read_producers
from storage.runs import RunPaths
from tasks.produced_rollouts import produce_groups
from telemetry.errors import DataError, InputError

QUOTA = 3


class Played:
    """A copy of the small run at work, a producer that plays for it, and what the test says meanwhile."""

    def __init__(self, first: RunPaths, root: Path) -> None:
        root.mkdir()
        for shared in ("_models", "_state_cache"):
            (root / shared).symlink_to(first.root.parent / shared)
        self.paths = RunPaths(root / "mine")
        shutil.copytree(first.root, self.paths.root)
        self.paths.summary.unlink()
        before = read_control(self.paths)
        self.desk = ControlDesk(self.paths, base_model=before.base_model, plays=before.plays, quota=QUOTA, max_policy_lag=2)
        self.desk.serve(PolicyVersion(version=0, adapter=None, adapter_hash="base"))

    def run(self, *said: Callable[[], Any], producer: str = "x") -> dict[str, Any]:
        """Play; whenever the producer has nothing to do, the next thing is said."""

        async def both() -> dict[str, Any]:
            playing = asyncio.create_task(produce_rollouts.fn("mine", self.paths.root.parent, producer=producer))
            for say in said:
                await self._rests(producer, playing)
                await asyncio.to_thread(say)
            return await playing

        return asyncio.run(both())

    async def _rests(self, producer: str, playing: "asyncio.Task[Any]") -> None:
        for _ in range(600):
            await asyncio.sleep(0.05)
            status = await asyncio.to_thread(read_producer, self.paths, producer)
            version = self.desk.control.version
            rests = status is not None and status.state == "waiting" and status.version == version
            if rests and status is not None and status.published and status.published % QUOTA == 0:
                return
            if playing.done():
                return
        raise AssertionError(f"it does not rest: {read_producer(self.paths, producer)}")

    def serve(self, version: int) -> None:
        from storage.adapters import read_adapter

        self.desk.serve(read_adapter(self.paths, version))

    def rows(self) -> list[tuple[str, int, int]]:
        with connect(self.paths.root) as sql:
            told = "select distinct producer, start_group, policy_version from decisions where producer <> 'local' order by all"
            return sql.sql(told).fetchall()


@pytest.fixture
def played(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uniform_engine: Any) -> Played:
    monkeypatch.setattr(rollout_side, "make_engine", lambda settings, model: uniform_engine())
    # Without Prefect: what its own runs of this flow do is tried in test_scale_out.py.
    monkeypatch.setattr(flow_module, "produce_groups", SimpleNamespace(with_options=lambda **_: produce_groups.fn))
    monkeypatch.setattr(flow_module, "FOLLOW_S", 0.1)
    monkeypatch.setattr(flow_module, "apply_threads", lambda threads: None)
    _, first, _ = trained
    return Played(first, tmp_path / "runs")


def test_it_plays_its_share_of_each_version_and_ends_with_the_run(played: Played):
    done = played.run(lambda: played.serve(1), lambda: played.desk.stop("its training has ended"))
    assert played.rows() == [("x", group, 0 if group < QUOTA else 1) for group in range(2 * QUOTA)]
    assert done["start_groups"] == 2 * QUOTA and done["decisions"] > 0 and done["why"] == "its training has ended"
    (status,), damaged = read_producers(played.paths)
    assert (status.state, status.published, status.in_flight, damaged) == ("ended", 2 * QUOTA, 0, [])
    assert status.sentence == "its training has ended"


def test_another_life_goes_on_with_its_own_numbers(played: Played):
    played.run(lambda: played.desk.stop("over"))
    played.desk = ControlDesk(played.paths, base_model=played.desk.control.base_model, plays=played.desk.control.plays,
                              quota=QUOTA, max_policy_lag=2)  # fmt: skip
    played.serve(1)

    def dismissed() -> None:
        played.desk.dismiss(["x"])

    done = played.run(dismissed)
    assert played.rows() == [("x", group, 0 if group < QUOTA else 1) for group in range(2 * QUOTA)]
    assert done["why"] == "the run needs fewer producers"
    status = read_producer(played.paths, "x")
    assert status is not None and status.published == 2 * QUOTA, "over both its lives"


def test_a_run_that_nobody_trains_any_more_is_left_after_a_while(played: Played, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flow_module, "IDLE_S", 0.5)
    assert "control file has not changed for" in played.run()["why"]


def test_a_producer_that_fails_again_and_again_ends_with_what_it_failed_with(
    played: Played, monkeypatch: pytest.MonkeyPatch, uniform_engine: Any
):
    played.desk._write(quota=100)
    monkeypatch.setattr(rollout_side, "make_engine", lambda settings, model: uniform_engine(fails=lambda request: True))
    with pytest.raises(Exception, match="forks failed"):
        played.run()
    status = read_producer(played.paths, "x")
    assert status is not None and status.state == "ended" and "forks failed" in status.sentence and played.rows() == []


def test_what_a_producer_cannot_play_for_is_one_sentence(played: Played):
    for change, kind, said in [
        ({"run": "none"}, InputError, "there is no run in"),
        ({"run": "../mine"}, InputError, "cannot name a folder"),
        ({"producer": "local"}, InputError, "the training flow's own name"),
    ]:
        arguments = {"run": "mine", "runs_root": played.paths.root.parent, "producer": "x"} | change
        with pytest.raises(kind, match=said):
            asyncio.run(produce_rollouts.fn(**arguments))
    played.desk.stop("its training has ended")
    played.paths.summary.write_text("{}")
    with pytest.raises(InputError, match="has done all its steps and needs no rollouts"):
        asyncio.run(produce_rollouts.fn("mine", played.paths.root.parent, producer="x"))
    played.paths.control.unlink()
    with pytest.raises(DataError, match="the run has not begun"):
        asyncio.run(produce_rollouts.fn("mine", played.paths.root.parent, producer="x"))
    assert not (played.paths.producers / "x.json").exists()


def test_two_producers_play_beside_each_other(played: Played):
    async def both() -> None:
        two = [asyncio.create_task(produce_rollouts.fn("mine", played.paths.root.parent, producer=name)) for name in ("x", "y")]
        for name in ("x", "y"):
            await played._rests(name, two[0])
        played.desk.stop("over")
        await asyncio.gather(*two)

    asyncio.run(both())
    assert played.rows() == [(name, group, 0) for name in ("x", "y") for group in range(QUOTA)]
    statuses, _ = read_producers(played.paths)
    assert [replace(status, pid=0).producer for status in statuses] == ["x", "y"]
