"""What recovery does with a lost flow run of train-policy, against a real server: no training, only its records."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed, Failed, Pending, Running

from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.child import process_start
from flows.recover_training import SILENT, _find_candidates, recover_training
from flows.train_policy import train_policy
from flows.work_record import WORK_FOLDER, machine, read_work, record_work
from storage.files import file_lock, publish_once
from storage.runs import RunPaths
from tasks.train_policy import train_step

# Prefect leaves sockets to the collector when a flow runs in a loop of its own.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

KILLED = Crashed(message="Flow run infrastructure exited with non-zero status code -9.")


class Place:
    """Runs in a folder, and a deployment of train-policy."""

    def __init__(self, root: Path, deployment: UUID, tag: str) -> None:
        self.root, self.deployment, self.tag = root, deployment, tag

    def settings(self, **changed: Any) -> RunSettings:
        return layered_settings("laptop", [], {"runs_root": self.root, **changed})

    async def ended(self, settings: RunSettings | dict[str, Any], *states: Any) -> FlowRun:
        """A flow run of these settings, or parameters, that ran and then came to these states, one after the other."""
        if isinstance(settings, RunSettings):
            settings = {"settings": settings.model_dump(mode="json"), "resume": False}
        async with get_client() as client:
            run = await client.create_flow_run_from_deployment(self.deployment, parameters=settings, state=Pending())
        return await self.goes_through(run, Running(), *states)

    async def goes_through(self, run: FlowRun, *states: Any) -> FlowRun:
        async with get_client() as client:
            for state in states:
                await client.set_flow_run_state(run.id, state, force=True)
            return await client.read_flow_run(run.id)

    async def started(self) -> list[FlowRun]:
        """Flow runs that wait to be begun."""
        waiting = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
        async with get_client() as client:
            tags = FlowRunFilterTags(all_=[self.tag, "recovered"])
            return await client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tags, state=waiting))

    def begun(self, run: str, *, steps: int, **changed: Any) -> RunPaths:
        """The folder of a run that has recorded so many steps."""
        paths = RunPaths(self.root / run).create()
        paths.settings.write_text(self.settings(run=run, **changed).model_dump_json())
        for step in range(1, steps + 1):
            publish_once(paths.ledger / f"step-{step:06d}.arrow", lambda aside: aside.write_bytes(b""))
        return paths


@pytest.fixture
def place(prefect_server: str, tmp_path: Path) -> Place:
    """A folder of runs, and a deployment whose flow runs bear a tag of this test's own."""

    return Place(tmp_path / "runs", asyncio.run(deployed(tmp_path.name, ["entente", "train", tmp_path.name])), tmp_path.name)


async def deployed(name: str, tags: list[str]) -> UUID:
    async with get_client() as client:
        return await client.create_deployment(await client.create_flow(train_policy), name=name, tags=tags, entrypoint="x.py:x")


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    """A process that does nothing, in the place of one that trains."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


async def state_of(run: FlowRun) -> State[Any]:
    """The flow run's state now."""
    async with get_client() as client:
        state = (await client.read_flow_run(run.id)).state
    assert state is not None
    return state


def recover(place: Place, run: FlowRun) -> str:
    """What recovery says of that flow run."""
    return asyncio.run(recover_training(flow_run_id=str(run.id), runs_root=place.root))[str(run.id)]


def noted(paths: RunPaths, run: FlowRun, process: psutil.Process | None = None) -> None:
    """That process, by default one that is gone, works at the run for that flow run."""
    record_work(paths, str(run.id))
    file = paths.root.parent / WORK_FOLDER / f"{run.id}.json"
    pid, began = (process.pid, process_start(process.pid)) if process else (os.getpid(), "another boot 1")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": pid, "began": began}))


@pytest.mark.system
def test_a_killed_run_without_a_name_is_found_and_goes_on_once_however_often_it_is_asked_for(place: Place):
    paths = place.begun("tiny-7", steps=2, prompts={"own_line": "in_place"})  # another version had other defaults
    killed = asyncio.run(place.ended(place.settings(), KILLED))
    noted(paths, killed)
    said = recover(place, killed)
    assert "run 'tiny-7' continues after step 2, attempt 1 of 3" in said
    assert "was handled already" in recover(place, killed)
    (again,) = asyncio.run(place.started())
    assert again.parameters["resume"] is True and again.parameters["settings"]["run"] == "tiny-7"
    assert RunSettings.model_validate(again.parameters["settings"]).prompts.own_line == "in_place"
    assert {"train", "recovered"} <= set(again.tags) and again.deployment_id == place.deployment


@pytest.mark.system
def test_a_run_that_never_gets_further_is_given_up_with_an_alert(place: Place):
    paths = place.begun("loop", steps=1)
    settings = place.settings(run="loop")
    said = []
    for _ in range(4):
        killed = asyncio.run(place.ended(settings, KILLED))
        noted(paths, killed)
        said.append(recover(place, killed))
    assert "attempt 3 of 3" in said[2] and "3 times at step 1" in said[3]
    assert len(asyncio.run(place.started())) == 3
    (alert,) = map(json.loads, paths.alerts.read_text().splitlines())
    assert alert["name"] == "not_recovered"


@pytest.mark.system
def test_a_run_that_never_got_as_far_as_a_name_is_given_up_as_well(place: Place):
    last = asyncio.run(place.ended(place.settings(), KILLED))
    for attempt in (1, 2, 3):
        assert f"attempt {attempt} of 3" in recover(place, last) and "was handled already" in recover(place, last)
        again = max(asyncio.run(place.started()), key=lambda run: str(run.expected_start_time))
        last = asyncio.run(place.ended(again.parameters, KILLED))
    assert "3 times at step 0" in recover(place, last)
    (alert,) = map(json.loads, next(place.root.glob("*/alerts.jsonl")).read_text().splitlines())
    assert alert["name"] == "not_recovered" and len(asyncio.run(place.started())) == 3


@pytest.mark.system
def test_a_flow_run_that_somebody_starts_again_is_looked_after_again(place: Place):
    paths = place.begun("mine", steps=1)
    refused = Failed(message="Flow run encountered an exception: InputError: no such card")
    failed = asyncio.run(place.ended(place.settings(run="mine"), refused))
    assert "would recur on every attempt" in recover(place, failed)
    asyncio.run(place.goes_through(failed, Crashed(message="reported by its worker too")))
    assert "was handled already" in recover(place, failed)
    for attempt in (1, 2):
        asyncio.run(place.goes_through(failed, AwaitingRetry(), Running(), KILLED))
        noted(paths, failed)
        assert f"attempt {attempt} of 3" in recover(place, failed)
    assert len(asyncio.run(place.started())) == 2


@pytest.mark.system
def test_a_run_that_goes_on_keeps_the_job_variables_of_its_flow_run(place: Place):
    async def larger() -> FlowRun:
        given = {"settings": place.settings(run="large").model_dump(mode="json"), "resume": False}
        async with get_client() as client:
            run = await client.create_flow_run_from_deployment(
                place.deployment, parameters=given, state=Pending(), job_variables={"memory": "128Gi"}
            )
        return await place.goes_through(run, Running(), KILLED)

    assert "attempt 1" in recover(place, asyncio.run(larger()))
    (again,) = asyncio.run(place.started())
    assert again.job_variables == {"memory": "128Gi"}


@pytest.mark.system
def test_a_run_that_was_renamed_after_its_loss_is_not_begun_anew(place: Place):
    lost = asyncio.run(place.ended(place.settings(run="mine"), KILLED))
    paths = place.begun("mine", steps=1)
    noted(paths, lost)
    paths.root.rename(place.root / "renamed")
    assert "its run 'mine' was removed or renamed" in recover(place, lost)
    assert asyncio.run(place.started()) == [] and not paths.root.exists()


@pytest.mark.system
def test_a_run_that_cannot_be_recovered_keeps_no_other_from_it(place: Place):
    removed = Place(place.root, asyncio.run(deployed(f"{place.tag}-removed", ["entente", "train"])), place.tag)
    left = [asyncio.run(removed.ended(place.settings(run=f"run-{number}"), KILLED)).id for number in range(3)]
    asyncio.run(place.ended(place.settings(run="two"), KILLED))

    async def look() -> None:
        async with get_client() as client:
            await client.delete_deployment(removed.deployment)
            try:
                await recover_training.fn(runs_root=place.root)
            finally:
                for each in left:
                    await client.delete_flow_run(each)

    with pytest.raises(PrefectHTTPStatusError, match="Deployment not found"):
        asyncio.run(look())
    assert [run.name for run in asyncio.run(place.started())] == ["train-two"]


@pytest.mark.system
def test_an_input_error_in_a_folder_of_runs_that_does_not_exist_raises_its_alert(place: Place, tmp_path: Path):
    refused = Failed(message="Flow run encountered an exception: InputError: no such card")
    failed = asyncio.run(place.ended(place.settings(run="mine", runs_root=tmp_path / "others"), refused))
    assert "would recur on every attempt" in recover(place, failed)
    assert "not_recovered" in (tmp_path / "others" / WORK_FOLDER / "alerts.jsonl").read_text()


@pytest.mark.system
def test_a_pending_run_of_another_project_is_left_alone(place: Place, monkeypatch: pytest.MonkeyPatch):
    other = asyncio.run(deployed(f"{place.tag}-other", ["train"]))
    monkeypatch.setattr("flows.recover_training.PENDING_S", 0.0)

    async def pending() -> FlowRun:
        async with get_client() as client:
            return await client.create_flow_run_from_deployment(other, parameters={"settings": {}}, state=Pending())

    theirs = asyncio.run(pending())
    asyncio.run(recover_training.fn(runs_root=place.root))
    assert asyncio.run(state_of(theirs)).is_pending()


@pytest.mark.system
def test_a_flow_run_that_starts_again_is_not_taken_for_its_earlier_process(place: Place):
    killed = asyncio.run(place.ended(place.settings(run="mine"), KILLED))
    noted(place.begun("mine", steps=1), killed)
    asyncio.run(place.goes_through(killed, AwaitingRetry(), Pending()))
    asyncio.run(recover_training(runs_root=place.root))
    assert asyncio.run(state_of(killed)).is_pending() and asyncio.run(place.started()) == []


@pytest.mark.system
def test_a_path_in_a_flow_run_s_parameters_comes_to_nothing(place: Place):
    outside = asyncio.run(place.ended(place.settings(run="mine").model_copy(update={"run": "../outside"}), KILLED))
    assert "its parameters are not those of a training run" in recover(place, outside)
    assert not (place.root.parent / "outside").exists()


@pytest.mark.system
def test_a_process_that_was_stopped_is_ended_and_its_run_goes_on(place: Place, sleeper: psutil.Process):
    paths = place.begun("stopped", steps=1)
    quiet = asyncio.run(place.ended(place.settings(run="stopped"), Crashed(message=f"{SILENT} for 120 s")))
    noted(paths, quiet, sleeper)
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert "continues after step 1" in recover(place, quiet)
    assert len(asyncio.run(place.started())) == 1
    assert not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE


@pytest.mark.system
def test_the_sweep_finds_what_no_event_told(place: Place):
    """A host that was lost at once: Prefect still shows its flow run as running."""
    paths = place.begun("host", steps=1)
    lost = asyncio.run(place.ended(place.settings(run="host")))
    noted(paths, lost)
    assert "continues after step 1" in asyncio.run(recover_training(runs_root=place.root))[str(lost.id)]


@pytest.mark.system
def test_a_check_takes_over_what_prefect_named_to_one_that_it_cancelled(place: Place):
    """After days without a worker all checks start at once, and the one that goes on may name no flow run, or another."""
    old = Place(place.root, asyncio.run(deployed(f"{place.tag}-old", ["train", place.tag])), place.tag)  # no look finds it
    lost = asyncio.run(old.ended(place.settings(run="mine"), KILLED))
    noted(place.begun("mine", steps=1), lost)
    assert str(lost.id) not in asyncio.run(recover_training(runs_root=place.root))

    async def cancelled(named: str) -> None:
        async with get_client() as client:
            given = {"flow_run_id": named, "runs_root": str(place.root)}
            check = await client.create_flow_run(recover_training, parameters=given, tags=["entente", "recover"])
            await client.set_flow_run_state(check.id, Cancelled(message="Deployment concurrency limit reached."), force=True)

    for named in ("", "no id", str(UUID(int=7)), str(lost.id)):
        asyncio.run(cancelled(named))
    assert "continues after step 1" in asyncio.run(recover_training(runs_root=place.root))[str(lost.id)]
    assert "handled already" in asyncio.run(recover_training(runs_root=place.root))[str(lost.id)]
    assert len(asyncio.run(place.started())) == 1


def test_a_run_that_only_the_last_of_many_cancelled_checks_names_is_found():
    """Two days without a worker leave 576 checks, one each five minutes, and a server lists 200 at a time."""
    checks, lost = [SimpleNamespace(id=UUID(int=each), parameters={"flow_run_id": ""}) for each in range(576)], UUID(int=999)
    checks[-1].parameters["flow_run_id"] = str(lost)

    async def read(*, flow_run_filter: FlowRunFilter, offset: int = 0, **_: Any) -> list[Any]:
        if flow_run_filter.id is not None:
            return [SimpleNamespace(id=each) for each in flow_run_filter.id.any_ or ()][offset:]
        state = flow_run_filter.state
        cancelled = state is not None and state.type is not None and state.type.any_ == [StateType.CANCELLED]
        return checks[offset : offset + 200] if cancelled else []

    client: Any = SimpleNamespace(read_flow_runs=read)
    assert asyncio.run(_find_candidates(client)) == {lost}


@pytest.mark.system
def test_a_process_that_lives_and_does_nothing_for_long_is_ended_by_the_sweep(
    place: Place, sleeper: psutil.Process, monkeypatch: pytest.MonkeyPatch
):
    paths = place.begun("hung", steps=1)
    hung = asyncio.run(place.ended(place.settings(run="hung")))
    noted(paths, hung, sleeper)
    assert str(hung.id) not in asyncio.run(recover_training(runs_root=place.root)), "it began just now"
    monkeypatch.setattr("flows.recover_training.STALLED_MINUTES", 1e-6)
    assert "continues after step 1" in asyncio.run(recover_training(runs_root=place.root))[str(hung.id)]
    assert not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE


@pytest.mark.system
def test_what_somebody_cancelled_stays_ended(place: Place):
    """The look falls between the crash that its ended process reports and Prefect's Cancelled."""
    paths = place.begun("mine", steps=1)
    ended = asyncio.run(place.ended(place.settings(run="mine"), Cancelling(), KILLED))
    noted(paths, ended)
    assert "it was cancelled or suspended" in recover(place, ended) and asyncio.run(place.started()) == []


@pytest.mark.system
def test_a_run_whose_worker_was_lost_while_it_was_cancelled_counts_as_cancelled(place: Place):
    lost = asyncio.run(place.ended(place.settings(run="mine"), Cancelling()))
    noted(place.begun("mine", steps=1), lost)
    asyncio.run(recover_training(runs_root=place.root))
    assert asyncio.run(state_of(lost)).is_cancelled() and asyncio.run(place.started()) == []


@pytest.mark.system
def test_a_run_in_another_folder_of_runs_goes_on_there(place: Place, tmp_path: Path):
    killed = asyncio.run(place.ended(place.settings(run="mine"), KILLED))
    noted(place.begun("mine", steps=2), killed)
    said = asyncio.run(recover_training(flow_run_id=str(killed.id), runs_root=tmp_path / "others"))
    assert "continues after step 2" in said[str(killed.id)]
    (again,) = asyncio.run(place.started())
    assert again.parameters["resume"] and again.parameters["settings"]["runs_root"] == str(place.root)


@pytest.mark.system
def test_tasks_of_a_run_that_was_killed_do_not_run_for_ever(place: Place):
    killed = asyncio.run(place.ended(place.settings(run="mine"), KILLED))
    working = asyncio.run(place.ended(place.settings(run="other")))

    async def tasks() -> list[StateType | None]:
        async with get_client() as client:
            made = [
                await client.create_task_run(train_step, each.id, dynamic_key=f"{number}", state=state)
                for each in (killed, working)
                for number, state in enumerate((Running(), Pending()))
            ]
            await recover_training(flow_run_id=str(killed.id), runs_root=place.root)
            return [(await client.read_task_run(each.id)).state_type for each in made]

    assert asyncio.run(tasks()) == [StateType.CRASHED, StateType.CRASHED, StateType.RUNNING, StateType.PENDING]


def test_a_second_look_leaves_all_to_the_first_without_waiting_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flows.recover_training.get_client", None)  # nothing is asked of a server
    with file_lock(tmp_path / WORK_FOLDER / ".recovery.lock"):
        assert asyncio.run(recover_training.fn(flow_run_id="", runs_root=tmp_path)) == {}


def test_who_works_at_a_run_is_known_for_30_days_after_its_last_change(tmp_path: Path):
    working, left, new = (RunPaths(tmp_path / name).create() for name in ("working", "left", "new"))
    long_ago = time.time() - 31 * 86_400
    for paths, flow_run in ((left, "3d4e"), (working, "1b2c")):
        record_work(paths, flow_run)
        paths.settings.touch()
        for file in (tmp_path / WORK_FOLDER / f"{flow_run}.json", *paths.root.iterdir()):
            os.utime(file, (long_ago, long_ago))
    working.metrics.touch()
    record_work(new, "5f60")
    assert [read_work(tmp_path, each) is not None for each in ("1b2c", "3d4e", "5f60")] == [True, False, True]


def test_who_works_at_a_run_is_told_by_more_than_a_process_number(tmp_path: Path, sleeper: psutil.Process):
    paths = RunPaths(tmp_path / "runs" / "mine").create()
    record_work(paths, "1b2c")
    mine = read_work(paths.root.parent, "1b2c")
    assert mine is not None and mine.process() == "alive" and mine.machine == machine()
    file = tmp_path / "runs" / WORK_FOLDER / "1b2c.json"
    for changed, what in [
        ({"began": "another boot 1"}, "gone"),
        ({"machine": "another 1 2"}, "elsewhere"),
        ({"pid": 2**22 + 1}, "gone"),
    ]:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"began": mine.began} | changed))
        found = read_work(paths.root.parent, "1b2c")
        assert found is not None and found.process() == what
        file.write_text(json.dumps({name: getattr(mine, name) for name in ("flow_run", "run", "machine", "pid", "began")}))
    file.write_text("{")
    assert read_work(paths.root.parent, "1b2c") is None
