"""A worker process of a cluster opens a run once, and a cluster that is not there is one sentence.

A real cluster plays a whole run in tests/flows/test_scale_out.py.
"""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entente.records.policy_version import BASE
from entente.rollouts.groups import GroupRange
from entente.settings.layers import layered_settings, settings_of
from entente.telemetry.errors import InputError
from storage.control import ControlDesk, read_control
from storage.files import durable_write, file_marks
from storage.runs import RunPaths
from storage.shards import LOCAL_PRODUCER, shard_path
from tasks import dask_rollouts, rollout_worker
from tasks.dask_rollouts import check_scheduler, close_worker, dask_cluster, play_here

FIRST = 100


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, uniform_engine: Any) -> Iterator[list[Any]]:
    """Engines that were made."""
    engines: list[Any] = []

    def make(settings: Any, model: Any) -> Any:
        engines.append(uniform_engine())
        return engines[-1]

    monkeypatch.setattr(rollout_worker, "make_engine", make)
    yield engines
    for root in list(dask_rollouts._open):
        asyncio.run(close_worker(root))


@pytest.mark.system
def test_a_cluster_on_this_machine_takes_work_from_its_own_run_alone(tmp_path: Path):
    asked = {"runs_root": tmp_path, "run": "mine", "pipeline": {"task_runner": "dask", "dask_workers": 1}}

    async def work() -> tuple[str, int]:
        async with dask_cluster(layered_settings("laptop", [], asked)) as cluster:
            return cluster._client.scheduler.address, await cluster._client.submit(os.getpid, pure=False)

    address, process = asyncio.run(work())
    assert address.startswith("tls://127.0.0.1:"), "with a key that no other user of the machine has"
    assert process != os.getpid()


def test_a_process_opens_a_run_once_and_plays_what_the_flow_itself_would(run: Any, opened: list[Any]):
    paths, _ = run(version=2)
    size = 2  # start groups of a step of the small run

    async def play() -> list[Any]:
        return list(
            await asyncio.gather(*(play_here(paths.root, GroupRange((step - 1) * size, size, step)) for step in (51, 52)))
        )

    reports = asyncio.run(play())
    assert len(opened) == 1 and [report["start_groups"] for report in reports] == [size, size]
    assert all(shard_path(paths, LOCAL_PRODUCER, first).exists() for first in (FIRST, FIRST + size))
    again = asyncio.run(play_here(paths.root, GroupRange(FIRST, size, 51)))
    assert len(opened) == 1 and again == reports[0], "what is published is not played again"


def test_a_side_that_plays_under_former_settings_is_closed_for_a_new_one(run: Any, opened: list[Any], serve: Any):
    paths, _ = run()
    asyncio.run(play_here(paths.root, GroupRange(FIRST, 1, 51)))
    settings = paths.settings.read_text().replace('"forks_per_group": 4', '"forks_per_group": 3')
    paths.settings.write_text(settings)
    plays = settings_of(paths).plays
    other = ControlDesk(paths, base_model=read_control(paths).base_model, plays=plays, max_policy_lag=2)
    serve(paths, other, 1)
    asyncio.run(play_here(paths.root, GroupRange(FIRST + 1, 1, 51)))
    assert len(opened) == 2 and [side.settings.plays for side in dask_rollouts._open.values()] == [plays]


def test_an_open_run_is_not_played_for_one_of_its_name_that_was_made_again_from_another_base(run: Any, opened: list[Any]):
    """The worker outlived the first, and has its engine open; the new run's settings are the same."""
    paths, _ = run()
    asyncio.run(play_here(paths.root, GroupRange(FIRST, 1, 51)))
    paths.control.write_text(read_control(paths).model_copy(update={"base_model": "another"}).model_dump_json())
    with pytest.raises(InputError, match="trains the model another, but"):
        asyncio.run(play_here(paths.root, GroupRange(FIRST + 1, 1, 51)))


def test_a_run_that_was_started_again_gets_an_engine_and_league_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its flow was killed, so the worker outlived it: of the same name, settings and base, it has other weights as version 10."""
    paths, closed = RunPaths(tmp_path / "mine"), []
    paths.root.mkdir()

    async def opened(root: Path, *, worker: str) -> Any:
        async def close() -> None:
            closed.append(side)

        of = SimpleNamespace(provenance={"base_model": "base"}, started=file_marks(RunPaths(root).settings))
        side = SimpleNamespace(settings=SimpleNamespace(plays="same"), resources=of, close=close)
        return side

    def begin() -> Any:
        durable_write(paths.settings, b"{}")
        ControlDesk(paths, base_model="base", plays="same", max_policy_lag=2).serve(BASE)
        return dask_rollouts._side_of(paths.root)

    monkeypatch.setattr(dask_rollouts.RolloutWorker, "open", opened)
    monkeypatch.setattr(dask_rollouts, "_open", {})
    first = begin()
    assert dask_rollouts._side_of(paths.root) is first and not closed
    assert begin() is not first and closed == [first]


def test_an_open_run_is_not_played_for_a_training_process_with_other_code(run: Any, opened: list[Any]):
    paths, _ = run()
    asyncio.run(play_here(paths.root, GroupRange(FIRST, 1, 51)))
    control = read_control(paths)
    resumed = control.model_copy(update={"program": (*control.program[:-1], "package state_cache=0")})
    paths.control.write_text(resumed.model_dump_json())
    with pytest.raises(InputError, match=r"another version of the program: package state_cache is .* start the workers again"):
        asyncio.run(play_here(paths.root, GroupRange(FIRST + 1, 1, 51)))
    assert len(opened) == 1


@pytest.mark.parametrize("address", ["nonsense", "tcp://host:many"])
def test_an_address_that_is_none_is_refused(address: str):
    with pytest.raises(InputError, match="is no address of a Dask scheduler"):
        check_scheduler(address)


def test_an_address_at_which_nobody_listens_is_refused_and_a_cluster_of_our_own_needs_none():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="no Dask scheduler answers at"):
            check_scheduler(f"127.0.0.1:{nobody.getsockname()[1]}")
    check_scheduler("")
