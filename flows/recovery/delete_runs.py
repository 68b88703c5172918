"""Removes old flow runs from Prefect's database. All their results are also in files.

It uses Prefect's own API, so it works with any server. Prefect removes a flow run's task runs and states with it, and its logs a
moment later. It would leave the artifacts behind, so these are removed one by one. Prefect removes events by itself
(PREFECT_SERVER_EVENTS_RETENTION_PERIOD). The file of an SQLite database keeps its size: SQLite writes new rows into the freed
pages. This is no flow, because a flow run would add what it removes.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterEndTime,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound

_PAGE = 100
_LOGS_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OldRun:
    """An ended flow run."""

    id: UUID
    name: str
    ended: datetime


async def find_old_runs(days: float) -> list[OldRun]:
    """Flow runs that ended more than `days` ago, the oldest first. Runs without an end time may be at work."""
    before = datetime.now(UTC) - timedelta(days=days)
    ended_before = FlowRunFilter(end_time=FlowRunFilterEndTime.model_validate({"before_": before, "is_null_": False}))
    found: list[OldRun] = []
    async with get_client() as client:
        while page := await client.read_flow_runs(
            flow_run_filter=ended_before, sort=FlowRunSort.END_TIME_DESC, limit=_PAGE, offset=len(found)
        ):
            found += [OldRun(id=run.id, name=run.name, ended=run.end_time) for run in page if run.end_time is not None]
    return found[::-1]


async def delete_runs(runs: Sequence[OldRun]) -> int:
    """Remove flow runs with their artifacts and logs. Returns how many were removed."""
    removed = 0
    async with get_client() as client:
        for run in runs:
            await _remove_artifacts(client, run.id)
            try:
                await client.delete_flow_run(run.id)
                removed += 1
            except ObjectNotFound:  # it was removed with its parent run
                continue
        await _wait_for_logs(client, [run.id for run in runs])
    return removed


async def _remove_artifacts(client: PrefectClient, run: UUID) -> None:
    mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    while found := await client.read_artifacts(artifact_filter=mine, limit=_PAGE):
        for artifact in found:
            await client.delete_artifact(artifact.id)


async def _wait_for_logs(client: PrefectClient, runs: list[UUID]) -> None:
    """Wait: the server removes logs after it has answered, and would keep them if it were stopped at once."""
    until = time.monotonic() + _LOGS_WITHIN_S
    for some in (runs[start : start + _PAGE] for start in range(0, len(runs), _PAGE)):
        theirs = LogFilter(flow_run_id=LogFilterFlowRunId(any_=some))
        while await client.read_logs(theirs, limit=1) and time.monotonic() < until:
            await asyncio.sleep(0.2)
