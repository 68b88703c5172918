"""Flow: see to it that a training run whose process was lost goes on, or tell somebody that it does not.

Started by an automation when a flow run tagged `train` crashed, failed, or gave no sign of life (cli/automations.py), and on a
schedule for what no event told. Prefect only says where to look: whether a run is done, who trains it and how far it came is read
from its folder, and two that train it at once are kept apart by its locks and ledgers, not by this.
"""

import asyncio
import json
import os
import signal
import time
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
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Crashed, Running, Scheduled
from prefect.types import DateTime
from prefect.types._datetime import now

from flows.given_parameters import check_given
from flows.open_run import finished_summary
from flows.recovery.mark_crashed import mark_children_crashed
from flows.recovery.service_alerts import find_service_alerts
from flows.run_names import recovery_name
from pipeline.recovery_rule import Attempts, Facts, RecoveryAction, decide
from pipeline.run_settings import RunSettings, settings_of
from pipeline.settings_form import folded, unfolded
from pipeline.work_record import WORK_FOLDER, Work, work_of
from storage.lineages import last_step, lineage_path
from storage.runs import RunPaths, check_name, durable_write, held
from tasks.alerts import raise_alert, with_hooks
from telemetry.alerts import Alert, AlertSettings
from telemetry.errors import InputError
from telemetry.progress import reporter

SILENT = "no sign of life came from it"
"""Begins the message of a state that the automation on missing heartbeats sets."""
TAG = "train"
"""Tag of the flow runs that are recovered."""
_PENDING_S = 300.0
"""Seconds after which a run that a worker took over and never began counts as lost with that worker."""
_ENDS_WITHIN_S = 60.0
_LOOKS_BACK = timedelta(days=1)


@flow(name="recover-training", flow_run_name=recovery_name, timeout_seconds=900, retries=2, retry_delay_seconds=10)
async def recover_training(flow_run_id: str = "", runs_root: Path = Path("runs"), alert_file: str = "") -> dict[str, str]:
    """Look at one training run, or at all; what was done about each, by flow run.

    Args:
        flow_run_id: The flow run of `train-policy` that ended; empty: all that ended in the last day, or seem to be at work.
        runs_root: Folder of all runs.
        alert_file: Name of the file that says where to tell what concerns no single run, such as a worker that is lost: 'mine' is
            `mine.toml` in `_alerts` under `runs_root`. A run's own settings say it for that.

    Raises:
        InputError: there is no such file.
    """
    check_given(Path(runs_root))
    told = with_hooks(AlertSettings(file=alert_file), Path(runs_root))
    done: dict[str, str] = {}
    async with get_client() as client:
        ids = [UUID(flow_run_id)] if flow_run_id else await _worth_a_look(client, Path(runs_root))
        for each in ids:
            # Its event and the schedule may ask at once, on several hosts: one after another, the later finds it answered.
            with held(Path(runs_root) / WORK_FOLDER / ".recovery.lock", wait_s=120):
                done[str(each)] = await _look_at(client, each, Path(runs_root))
                reporter().say(done[str(each)])
        if not flow_run_id:
            for alert in await find_service_alerts(client, Path(runs_root)):
                file = Path(runs_root) / WORK_FOLDER / "alerts.jsonl"
                await asyncio.to_thread(raise_alert, file, alert, told)
    return done


async def _worth_a_look(client: PrefectClient, runs_root: Path) -> list[UUID]:
    """Flow runs that ended badly in the last day, and those that count as at work and whose process is gone."""
    tagged = FlowRunFilterTags(all_=[TAG])
    bad = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED, StateType.FAILED]))
    recent = FlowRunFilterEndTime(after_=cast(DateTime, now("UTC") - _LOOKS_BACK))
    ended = await client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tagged, state=bad, end_time=recent))
    busy = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING]))
    found = [run.id for run in ended]
    for run in await client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tagged, state=busy)):
        work = work_of(runs_root, str(run.id))
        assert run.state is not None
        since = (now("UTC") - run.state.timestamp).total_seconds()
        never_began = run.state.is_pending() and work is None and since > _PENDING_S
        hangs = work is not None and work.process() == "alive" and _hangs(RunPaths(runs_root / work.run), work)
        if hangs and work is not None:
            os.kill(work.pid, signal.SIGKILL)
        if never_began or hangs or (work is not None and work.process() == "gone"):
            lost = "its process did nothing for long, and was ended" if hangs else "its process is gone"
            why = "its worker was lost before it began" if work is None else lost
            await client.set_flow_run_state(run.id, Crashed(message=why), force=True)
            found.append(run.id)
    return found


def _hangs(paths: RunPaths, work: Work) -> bool:
    """Whether the process lives and nothing of the run has moved for twice as long as counts as stalled."""
    try:
        bound = 120 * settings_of(paths).alerts.stalled_minutes
    except InputError:  # it has not begun
        return False
    parts = [paths.metrics, paths.scores, paths.checkpoints, paths.adapters, *paths.ledger.glob("*"), *paths.shards.glob("*")]
    moved = max([work.began, *(part.stat().st_mtime for part in parts if part.exists())])
    return 0 < bound < time.time() - moved


async def _look_at(client: PrefectClient, flow_run: UUID, runs_root: Path) -> str:
    ended = await client.read_flow_run(flow_run)
    if ended.state is None or not (ended.state.is_crashed() or ended.state.is_failed()) or ended.deployment_id is None:
        return f"'{ended.name}' is left as it is: it did not crash or fail, or was started by hand"
    settings, work = _settings(ended), work_of(runs_root, str(flow_run))
    if settings is None:
        return f"'{ended.name}' is left as it is: its parameters are not those of a training run"
    settings = settings.model_copy(update={"runs_root": runs_root, "run": work.run if work else settings.run})
    if str(flow_run) in (answered := _answered(settings.paths)):
        return f"'{ended.name}' was seen to already: {answered[str(flow_run)]}"
    await _gone(work if not _silent(ended) else None)
    decision = decide(await asyncio.to_thread(_facts, settings, work, ended))
    if decision.action == "revive":
        await client.set_flow_run_state(flow_run, Running(message=decision.because), force=True)
        return decision.because
    if decision.kill and work is not None:
        os.kill(work.pid, signal.SIGKILL)
        await _gone(work)
    if decision.action == "resume":
        said = await _start_again(client, ended, settings, decision)
    else:
        said = decision.because
    if decision.action == "give_up":
        begun = bool(settings.run) and settings.paths.root.is_dir()
        alert = Alert(name="not_recovered", run=settings.run or ended.name, step=decision.attempts.step, sentence=said)
        file = settings.paths.alerts if begun else runs_root / WORK_FOLDER / "alerts.jsonl"
        await asyncio.to_thread(raise_alert, file, alert, _hooks(settings))
    if settings.run and decision.action != "leave":
        _note(settings.paths, decision.attempts, answered | {str(flow_run): said})
    await mark_children_crashed(client, flow_run, "its flow run's process ended")
    return said


async def _start_again(client: PrefectClient, ended: FlowRun, settings: RunSettings, decision: RecoveryAction) -> str:
    """Start the deployment anew with the run's name; asked twice for one flow run, Prefect starts it once."""
    assert ended.deployment_id is not None
    begun, lineage = settings.run and settings.paths.settings.is_file(), str(ended.parameters.get("fork_lineage") or "")
    if lineage and lineage_path(settings.paths, lineage).is_file():
        lineage = ""  # it was opened, and is the one that the run goes on in
    told = ended.parameters | {
        "settings": folded(settings.model_dump(mode="json", exclude={"alerts": {"command", "webhook"}})),
        "resume": bool(begun),
        "fork_lineage": lineage,
    }
    begins = now("UTC") + timedelta(seconds=decision.wait_s)
    again = await client.create_flow_run_from_deployment(
        ended.deployment_id,
        parameters=told,
        state=Scheduled(scheduled_time=begins, message=decision.because),
        name=f"train-{settings.run}" if settings.run else None,
        tags=[*(tag for tag in ended.tags if tag != "recovered"), "recovered"],
        idempotency_key=f"recover-{ended.id}",
    )
    return f"{decision.because}, as flow run {again.id}"


def _settings(ended: FlowRun) -> RunSettings | None:
    """What the flow run was given; None if no training run can have been begun by it."""
    try:
        settings = RunSettings.model_validate(unfolded(ended.parameters.get("settings")))
        if settings.run:
            check_name(settings.run, "run")
    except (ValueError, InputError):
        return None
    return settings


def _hooks(settings: RunSettings) -> AlertSettings:
    """Where to tell of the run: what its file says, and never a command or an address out of a flow run's parameters."""
    alerts = settings.alerts.model_copy(update={"command": "", "webhook": ""})
    try:
        return with_hooks(alerts, settings.runs_root)
    except InputError as error:
        reporter().say(f"{error}; the alert stays in its file and on Prefect's pages")
        return alerts


def _facts(settings: RunSettings, work: Work | None, ended: FlowRun) -> Facts:
    paths, named = settings.paths, bool(settings.run)
    message = (ended.state and ended.state.message) or ""
    begun = named and paths.settings.is_file()
    return Facts(
        run=settings.run,
        finished=begun and finished_summary(settings) is not None,
        held=begun and _is_held(paths),
        process=work.process() if work else None,
        silent=_silent(ended),
        error=_error(message) if ended.state and ended.state.is_failed() else "",
        step=last_step(paths) if begun else 0,
        attempts=_attempts(paths) if named else Attempts(),
        attempts_max=settings.pipeline.recoveries_max,
    )


def _is_held(paths: RunPaths) -> bool:
    with held(paths.lock) as free:
        return not free


def _silent(ended: FlowRun) -> bool:
    return bool(ended.state and ended.state.is_crashed() and (ended.state.message or "").startswith(SILENT))


def _error(message: str) -> str:
    """The error's name in Prefect's "Flow run encountered an exception: TrainingError: the trainer ...\""""
    parts = message.split(": ", 2)
    return parts[1] if len(parts) == 3 and parts[1].isidentifier() else ""


async def _gone(work: Work | None) -> None:
    """Wait until the process is gone, which may still be closing what it had open; not for ever."""
    until = time.monotonic() + _ENDS_WITHIN_S
    while work is not None and work.process() == "alive" and time.monotonic() < until:
        await asyncio.sleep(0.5)


def _stored(paths: RunPaths) -> dict[str, Any]:
    try:
        return json.loads(paths.recovery.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


def _attempts(paths: RunPaths) -> Attempts:
    return Attempts(**_stored(paths).get("attempts", {}))


def _answered(paths: RunPaths) -> dict[str, str]:
    return _stored(paths).get("answered", {})


def _note(paths: RunPaths, attempts: Attempts, answered: dict[str, str]) -> None:
    paths.root.mkdir(parents=True, exist_ok=True)
    durable_write(paths.recovery, json.dumps({"attempts": asdict(attempts), "answered": answered}, indent=1).encode())
