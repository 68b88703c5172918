"""Flow: resume a training run whose process was lost, or else raise an alert.

An automation (entente/prefect_server/automations.py) starts it when a flow run tagged `train` crashed, failed or sent no
heartbeat; a schedule covers losses without an event. Prefect only lists the flow runs, and whether a user cancelled one. The
run's folder shows whether it is done, which process trains it, and its newest step. Locks and ledgers prevent training twice
at once. Sweep runs belong to no deployment and are ignored.
"""

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Cancelled, Crashed, Running, Scheduled
from prefect.types import DateTime
from prefect.types._datetime import now

from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.alerts import STALLED_MINUTES, Alert
from entente.telemetry.errors import InputError, one_line
from entente.telemetry.progress import reporter
from flows.given_parameters import PINNED, check_parameters, named_after
from flows.open_run import finished_summary, with_run_name
from flows.recovery_rule import BEGINS, Attempts, Facts, RecoveryAction, decide, was_cancelled
from flows.work_record import WORK_FOLDER, FlowRunRecord, read_work
from storage.files import file_lock, is_held, make_directory
from storage.json_files import kept_object, write_json
from storage.ledger import last_step
from storage.runs import RunPaths, check_name, last_change
from tasks.alerts import raise_alert

SILENT = "no sign of life came from it"
"""Prefix of the state message that the missing-heartbeat automation sets."""
PROJECT_TAG = "entente"
TAGS = [PROJECT_TAG, "train"]
"""Tags of the flow runs to recover; other projects on the server may have training runs too."""
PENDING_S = 1200.0
"""Seconds until a flow run that a worker accepted but did not start counts as lost; deploy/job-template.json lets a pod wait for
900."""
_ENDS_WITHIN_S = 60.0
_LOOKS_BACK = timedelta(days=1)


@flow(
    name="recover-training",
    flow_run_name=named_after("recover", "flow_run_id"),
    timeout_seconds=900,
    **PINNED | dict[str, Any](retries=2, retry_delay_seconds=10),
)
async def recover_training(flow_run_id: str = "", runs_root: Path = Path("runs")) -> dict[str, str]:
    """Check all training runs that crashed or failed in the last day, that a check cancelled since names, or that count as
    running. Returns the actions by flow run id.

    One check at a time suffices, because it continues until nothing is left: Prefect cancels checks that would start meanwhile
    (prefect.yaml), and one on another host returns at once.

    Args:
        flow_run_id: An ended flow run of `train-policy`, however old; empty for none.
        runs_root: Folder of all runs.
    """
    check_parameters(runs_root)
    done: dict[str, str] = {}
    errors: list[Exception] = []
    with file_lock(runs_root / WORK_FOLDER / ".recovery.lock") as free:
        if not free:
            reporter().say("another check of all runs is in progress")
            return done
        async with get_client() as client:
            ids = {UUID(flow_run_id)} if flow_run_id else set()
            while ids := {each for each in ids | await _find_candidates(client) if str(each) not in done}:
                for each in ids:
                    try:
                        done[str(each)] = await _recover(client, each)
                    except Exception as error:  # raised once the other runs are recovered
                        errors.append(error)
                        done[str(each)] = f"flow run {each} cannot be recovered: {one_line(error)}"
                    reporter().say(done[str(each)])
            await _end_lost_tasks(client)
    if errors:
        raise errors[0]
    return done


async def _find_candidates(client: PrefectClient) -> set[UUID]:
    tagged = FlowRunFilterTags(all_=TAGS)
    bad = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED, StateType.FAILED]))
    recent = FlowRunFilterEndTime(after_=cast(DateTime, now("UTC") - _LOOKS_BACK))
    ended = await _flow_runs(client, FlowRunFilter(tags=tagged, state=bad, end_time=recent))
    busy = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]))
    ended += await _named_by_cancelled(client, bad, recent)
    candidates = {run.id for run in ended}
    for run in await _flow_runs(client, FlowRunFilter(tags=tagged, state=busy)):
        runs_root = _runs_root(run)
        assert run.state is not None
        # The process of a pending run has not begun: a record is of the start before a Retry.
        work = None if run.state.is_pending() else read_work(runs_root, str(run.id))
        since = (now("UTC") - run.state.timestamp).total_seconds()
        never_started = not run.state.is_running() and work is None and since > PENDING_S
        hangs = work is not None and work.process() == "alive" and _hangs(RunPaths(runs_root / work.run), since)
        if hangs and work is not None:
            os.kill(work.pid, signal.SIGKILL)
        if never_started or hangs or (work is not None and work.process() == "gone"):
            lost = "its process made no progress and was killed" if hangs else "its process is gone"
            why = "its worker was lost before it started" if work is None else lost
            end = Cancelled(message=why) if run.state.is_cancelling() else Crashed(message=why)
            await client.set_flow_run_state(run.id, end, force=True)
            candidates.add(run.id)
    return candidates


async def _named_by_cancelled(client: PrefectClient, bad: FlowRunFilterState, recent: FlowRunFilterEndTime) -> list[FlowRun]:
    """The ended flow runs of checks that Prefect cancelled because another was under way, as after days without a worker: these
    may have ended long before."""
    checks = FlowRunFilterTags(all_=[PROJECT_TAG, "recover"])
    cancelled = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLED]))
    only = FlowRunFilter(tags=checks, state=cancelled, end_time=recent)
    ids = set[UUID]()
    for check in await _flow_runs(client, only):
        with suppress(ValueError):  # most name none
            ids.add(UUID(check.parameters.get("flow_run_id") or ""))
    if not ids:
        return []
    return await _flow_runs(client, FlowRunFilter(id=FlowRunFilterId(any_=[*ids]), state=bad))


async def _flow_runs(client: PrefectClient, only: FlowRunFilter) -> list[FlowRun]:
    """All of them, page by page: a server lists 200 at a time, and two days without a worker leave 576 checks."""
    found = list[FlowRun]()
    while page := await client.read_flow_runs(flow_run_filter=only, sort=FlowRunSort.EXPECTED_START_TIME_ASC, offset=len(found)):
        found += page
    return found


async def _end_lost_tasks(client: PrefectClient) -> None:
    """Set running task runs of ended flow runs to Crashed: a killed process cannot report their end."""
    ended = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED, StateType.FAILED, StateType.CANCELLED]))
    going = TaskRunFilterState(name=None, type=TaskRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING]))
    for task in await client.read_task_runs(
        flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[PROJECT_TAG]), state=ended),
        task_run_filter=TaskRunFilter(state=going),
    ):
        await client.set_task_run_state(task.id, Crashed(message="the process of its flow run ended"), force=True)


def _hangs(paths: RunPaths, running_s: float) -> bool:
    """True if a flow run has changed no file of its run for twice `STALLED_MINUTES`."""
    quiet_s = time.time() - last_change(paths)
    return paths.settings.is_file() and min(quiet_s, running_s) > 120 * STALLED_MINUTES


async def _recover(client: PrefectClient, flow_run: UUID) -> str:
    ended = await client.read_flow_run(flow_run)
    if ended.deployment_id is None:
        return f"'{ended.name}' is left as it is: no deployment started it"
    if ended.state is None or not (ended.state.is_crashed() or ended.state.is_failed()):
        return f"'{ended.name}' is left as it is: it is {ended.state.name if ended.state else 'without a state'}"
    states = sorted(await client.read_flow_run_states(flow_run), key=lambda state: state.timestamp)
    if was_cancelled([state.type.value for state in states]):
        return f"'{ended.name}' is left as it is: it was cancelled or suspended"
    settings = _settings(ended)
    if settings is None:
        return f"'{ended.name}' is left as it is: its parameters are not those of a training run"
    work = read_work(settings.runs_root, str(flow_run))
    if work is not None and not RunPaths(settings.runs_root / work.run).root.is_dir():
        return f"'{ended.name}' is left as it is: its run '{work.run}' was removed or renamed"
    # A run that ended before it was named gets a name here, so that its restarts are counted.
    settings = settings.model_copy(update={"run": work.run}) if work else with_run_name(settings, flow_run.hex[-8:])
    # A user may start the flow run again: each of its ends is handled, however many states report it.
    start = next((state.id for state in reversed(states) if state.type.value in BEGINS), "")
    end = f"{flow_run}-{start}"
    if end in (handled := _read_handled(settings.paths)):
        return f"'{ended.name}' was handled already: {handled[end]}"
    await _wait_for_exit(work if not _silent(ended) else None)
    decision = decide(await asyncio.to_thread(_facts, settings, work, ended))
    if decision.action == "revive":
        await client.set_flow_run_state(flow_run, Running(message=decision.because), force=True)
        return decision.because
    if decision.kill and work is not None:
        os.kill(work.pid, signal.SIGKILL)
        await _wait_for_exit(work)
    if decision.action == "resume":
        sentence = await _start_again(client, ended, end, settings, decision)
    else:
        sentence = decision.because
    if decision.action == "give_up":
        has_folder = settings.paths.root.is_dir()
        alert = Alert(name="not_recovered", run=settings.run, step=decision.attempts.step, sentence=sentence)
        file = settings.paths.alerts if has_folder else settings.runs_root / WORK_FOLDER / "alerts.jsonl"
        make_directory(file.parent)
        raise_alert(file, alert)
    if decision.action != "leave":
        _write_handled(settings.paths, decision.attempts, handled | {end: sentence})
    return sentence


async def _start_again(client: PrefectClient, ended: FlowRun, end: str, settings: RunSettings, decision: RecoveryAction) -> str:
    """Start the deployment again for the same run. Idempotent per `end` of a flow run."""
    assert ended.deployment_id is not None
    begins = now("UTC") + timedelta(seconds=decision.wait_s)
    again = await client.create_flow_run_from_deployment(
        ended.deployment_id,
        parameters=_resumed(ended, settings),
        state=Scheduled(scheduled_time=begins, message=decision.because),
        name=f"train-{settings.run}",
        tags=[*(tag for tag in ended.tags if tag != "recovered"), "recovered"],
        work_queue_name=ended.work_queue_name,
        job_variables=ended.job_variables,
        idempotency_key=f"recover-{end}",
    )
    return f"{decision.because}, as flow run {again.id}"


def _resumed(ended: FlowRun, settings: RunSettings) -> dict[str, Any]:
    has_folder = settings.paths.settings.exists()
    if has_folder:  # another release may have started it, with other defaults
        try:
            settings = settings.model_copy(update={"prompts": settings_of(settings.paths).prompts})
        except InputError as error:  # the run will refuse too; continue with the other runs
            reporter().say(str(error))
    return ended.parameters | {
        "settings": settings.model_dump(mode="json"),
        "resume": has_folder,
    }


def _runs_root(run: FlowRun) -> Path:
    settings = run.parameters.get("settings")
    return Path(str(settings.get("runs_root", "runs") if isinstance(settings, dict) else "runs"))


def _settings(ended: FlowRun) -> RunSettings | None:
    """None if the parameters are not those of a training run."""
    try:
        check_parameters(_runs_root(ended))
        settings = RunSettings.model_validate(ended.parameters.get("settings"))
        if settings.run:
            check_name(settings.run, "run")
    except (ValueError, InputError):
        return None
    return settings


def _facts(settings: RunSettings, work: FlowRunRecord | None, ended: FlowRun) -> Facts:
    paths = settings.paths
    message = (ended.state and ended.state.message) or ""
    has_folder = paths.settings.exists()
    return Facts(
        run=settings.run,
        finished=has_folder and finished_summary(settings) is not None,
        held=has_folder and is_held(paths.lock),
        process=work.process() if work else None,
        silent=_silent(ended),
        error=_error_name(message) if ended.state and ended.state.is_failed() else "",
        step=last_step(paths) if has_folder else 0,
        attempts=_attempts(paths),
    )


def _silent(ended: FlowRun) -> bool:
    return bool(ended.state and ended.state.is_crashed() and (ended.state.message or "").startswith(SILENT))


def _error_name(message: str) -> str:
    """The error's name in Prefect's "Flow run encountered an exception: TrainingError: the trainer ...\""""
    parts = message.split(": ", 2)
    return parts[1] if len(parts) == 3 and parts[1].isidentifier() else ""


async def _wait_for_exit(work: FlowRunRecord | None) -> None:
    """Wait up to _ENDS_WITHIN_S for the process, which may still be closing its resources."""
    until = time.monotonic() + _ENDS_WITHIN_S
    while work is not None and work.process() == "alive" and time.monotonic() < until:
        await asyncio.sleep(0.5)


def _attempts(paths: RunPaths) -> Attempts:
    return Attempts(**kept_object(paths.recovery).get("attempts", {}))


def _read_handled(paths: RunPaths) -> dict[str, str]:
    return kept_object(paths.recovery).get("answered", {})


def _write_handled(paths: RunPaths, attempts: Attempts, handled: dict[str, str]) -> None:
    write_json(paths.recovery, {"attempts": asdict(attempts), "answered": handled})
