"""Alerts about Prefect itself: work pools without a worker, and schedules whose runs are cancelled or overlap.

The rules are pure functions. `find_service_alerts` reads Prefect's state. It stores which alerts are active, so that each is
raised once.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.types._datetime import now

from pipeline.work_record import WORK_FOLDER
from storage.files import durable_write
from telemetry.alerts import Alert

CANCELLED_IN_A_ROW = 3
"""An alert is raised when this many of the newest scheduled runs of one deployment were cancelled."""
LATE = timedelta(minutes=15)
"""A scheduled run that waits longer than this for the run before it counts as late."""
NOBODY = "all"
"""Stands for the run's name in an alert that concerns no single run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A flow run that a schedule created and whose start time has passed."""

    state: str
    late: bool
    """Whether it has waited for more than LATE."""


def check_pools(workers: Mapping[str, Sequence[bool]], waiting: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Pools that have workers of which none answers: rule and sentence, by a key for the pool.

    Args:
        workers: for each pool, whether each of its workers answers.
        waiting: runs that each pool has waiting.
    """
    gone = [pool for pool, answer in workers.items() if answer and not any(answer)]
    told = {pool: f"none of the {len(workers[pool])} workers of work pool '{pool}' answers" for pool in gone}
    return {
        f"pool {pool}": ("pool_without_worker", f"{said}; {waiting.get(pool, 0)} runs wait: start one with `entente up`")
        for pool, said in told.items()
    }


def check_schedules(newest_first: Mapping[str, Sequence[Scheduled]]) -> dict[str, tuple[str, str]]:
    """Deployments whose scheduled runs are cancelled, or start before the previous one ends: rule and sentence, by a key."""
    found = {}
    for name, runs in newest_first.items():
        ended = [run for run in runs if not run.late]
        last = ended[:CANCELLED_IN_A_ROW]
        if len(last) == CANCELLED_IN_A_ROW and all(run.state == "Cancelled" for run in last):
            count = next((index for index, run in enumerate(ended) if run.state != "Cancelled"), len(ended))
            said = f"the last {count} scheduled runs of '{name}' were cancelled: see whether an earlier one still holds its place"
            found[f"cancelled {name}"] = "schedules_cancelled", said
        if (late := sum(run.late for run in runs)) >= 2:
            said = f"{late} scheduled runs of '{name}' wait for the one before: its schedule comes round faster than a run ends"
            found[f"overlaps {name}"] = "schedule_overlaps", said
    return found


async def find_service_alerts(client: PrefectClient, runs_root: Path) -> list[Alert]:
    """Alerts that became active since the last call."""
    pools = [pool.name for pool in await client.read_work_pools()]
    workers = {pool: [w.status == "ONLINE" for w in await client.read_workers_for_work_pool(pool)] for pool in pools}
    runs: dict[str, list[Scheduled]] = {}
    for deployment in await client.read_deployments():
        if deployment.schedules:
            ours = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
            newest = await client.read_flow_runs(flow_run_filter=ours, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=50)
            runs[deployment.name] = _due(newest)
    waiting = {pool: sum(run.late for found in runs.values() for run in found) for pool in pools}
    return _new_alerts(runs_root / WORK_FOLDER / ".looked_over.json", check_pools(workers, waiting) | check_schedules(runs))


def _due(runs: Iterable[FlowRun]) -> list[Scheduled]:
    due = []
    for run in runs:
        at, state = run.expected_start_time, run.state
        if run.auto_scheduled and state is not None and at is not None and at <= now("UTC"):
            due.append(Scheduled(state=state.name or "", late=state.is_scheduled() and now("UTC") - at > LATE))
    return due


def _new_alerts(file: Path, active: Mapping[str, tuple[str, str]]) -> list[Alert]:
    """Alerts that were not active at the last call. Writes the active ones to `file`."""
    known = set(json.loads(file.read_bytes())) if file.exists() else set()
    file.parent.mkdir(parents=True, exist_ok=True)
    durable_write(file, json.dumps(sorted(active)).encode())
    new = [active[key] for key in sorted(set(active) - known)]
    return [Alert(name=rule, run=NOBODY, step=0, sentence=sentence) for rule, sentence in new]
