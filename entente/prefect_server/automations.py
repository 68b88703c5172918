"""Automations and limits of Prefect's server; `entente up` creates them, and updates those that differ.

    python -m entente.prefect_server.automations    applies them to the server at PREFECT_API_URL, without `entente up`

An automation only reports: missing heartbeats, a run to recover, an alert to forward. flows/recover_training.py reads the
run's files and decides. An automation that a user switched off stays off.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from entente.prefect_server.own_server import check_address, prefect_client
from entente.telemetry.errors import InputError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_T = TypeVar("_T")
WHOLE_MACHINE = "whole-machine"
"""Work queue of prefect.yaml for runs that use all cores; one run at a time."""
SILENT_S = 120
"""Seconds without a heartbeat until a run counts as crashed; four heartbeats are due by then."""
NOTIFIED = "entente-alerts"
"""Name of the notification block for alerts, which the user may create."""
FLOWS = ("build-state-cache", "evaluate-policy", "recover-training", "train-policy")
"""Names of the project's flows; the server may run those of other projects, whose heartbeats are rarer."""
RECOVERED = ("prefect.flow-run.Crashed", "prefect.flow-run.Failed", "prefect.flow-run.TimedOut")
"""Events that trigger recovery of a training run."""

ANSWERS_WITHIN_S, TRIES_AGAIN = 30.0, 3
"""Time limit of a request in seconds, and number of retries: on a busy machine SQLite may be locked for many seconds."""


def read_all(read: Callable[..., list[_T]], **how: Any) -> list[_T]:
    """All that `read` lists, page by page: a server lists 200 at a time, and a shared one may have more."""
    found = list[_T]()
    while page := read(offset=len(found), **how):
        found += page
    return found


def apply(client: "SyncPrefectClient") -> list[str]:
    """Create and update the server's automations. Returns a line for each that changed."""
    from prefect.events.schemas.automations import AutomationCore

    deployments = {each.entrypoint: each.id for each in read_all(client.read_deployments)}
    recovery = deployments.get("flows/recover_training.py:recover_training")
    wanted = [crash_silent_runs()]
    if recovery:
        wanted.append(recover_lost_runs(str(recovery)))
    wanted += pass_on_alerts(_notification_block(client))
    there = {each.name: each for each in read_all(client.read_automations)}
    lines = []
    for each in map(AutomationCore.model_validate, wanted):
        old = there.get(each.name)
        if old is None:
            client.create_automation(each)
            lines.append(f"{each.name}: made")
        elif AutomationCore.model_validate(old.model_dump()) != (kept := each.model_copy(update={"enabled": old.enabled})):
            client.update_automation(old.id, kept)
            lines.append(f"{each.name}: brought up to date")
    return lines


def limit_queue(client: "SyncPrefectClient", pool: str) -> bool:
    """Limit the queue for whole machines to one run, unless it has a limit. Returns True if it changed."""
    for queue in client.read_work_queues(work_pool_name=pool):
        if queue.name == WHOLE_MACHINE and queue.concurrency_limit is None:
            client.update_work_queue(queue.id, concurrency_limit=1)
            return True
    return False


def crash_silent_runs() -> dict[str, Any]:
    """Marks a flow run whose heartbeats stop as crashed: Prefect frees its slots, and the recovery automation starts."""
    states = ("Completed", "Failed", "TimedOut", "Crashed", "Cancelled", "Paused", "Suspended")
    ends = [f"prefect.flow-run.{state}" for state in states]
    return _automation(
        "Entente: a run without a sign of life has crashed",
        f"Runs send a heartbeat every 30 s. After {SILENT_S} s without one, the host or the process is lost or stopped.",
        {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": list(FLOWS)},
            "after": ["prefect.flow-run.heartbeat"],
            "expect": ["prefect.flow-run.heartbeat", *ends],
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": SILENT_S,
        },
        [
            {
                "type": "change-flow-run-state",
                "state": "CRASHED",
                "name": "Crashed",
                "message": f"no sign of life came from it for {SILENT_S} s: its host or process is lost, or stopped",
            }
        ],
    )


def recover_lost_runs(recovery: str) -> dict[str, Any]:
    """Starts the deployment with id `recovery` after a training run crashed or failed."""
    flow_run = {"__prefect_kind": "jinja", "template": "{{ event.resource.id.split('.')[-1] }}"}
    return _automation(
        "Entente: look after a training run that was lost",
        "Starts recover-training, which reads the files of the run: it resumes the run, leaves it, or raises an alert.",
        {
            "type": "event",
            "posture": "Reactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.train"},
            "expect": sorted(RECOVERED),
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": 0,
        },
        [
            {
                "type": "run-deployment",
                "source": "selected",
                "deployment_id": recovery,
                "parameters": {"flow_run_id": flow_run},
            }
        ],
    )


def pass_on_alerts(block: str | None) -> list[dict[str, Any]]:
    """Sends alerts, and work pools without a worker, to the notification block; without one the UI shows them."""

    def send(subject: str, body: str) -> list[dict[str, Any]]:
        if block is None:
            return [{"type": "do-nothing"}]
        return [{"type": "send-notification", "block_document_id": block, "subject": subject, "body": body}]

    where = (
        f"Sent to the notification block '{NOTIFIED}'"
        if block
        else f"Create a notification block named '{NOTIFIED}' to get alerts"
    )
    reactive = {"type": "event", "posture": "Reactive", "threshold": 1, "within": 0}
    return [
        _automation(
            "Entente: an alert of a run",
            f"A rule raised an alert: stalled, not finite, no progress, stale, disk, lost. {where}.",
            reactive | {"match": {"prefect.resource.id": "entente.run.*"}, "expect": ["entente.alert.*"]},
            send("Entente: {{ event.event }}", "{{ event.payload.sentence }}"),
        ),
        _automation(
            "Entente: a work pool lost its workers",
            f"Flow runs scheduled there will not start. {where}.",
            reactive | {"match": {"prefect.resource.id": "prefect.work-pool.*"}, "expect": ["prefect.work-pool.not-ready"]},
            send("Entente: no worker is left", "Work pool {{ event.resource.name }} has no worker: start one with `entente up`."),
        ),
    ]


@contextmanager
def server_client() -> Iterator["SyncPrefectClient"]:
    """Prefect's client of the server at PREFECT_API_URL; raises InputError from the block if it does not answer or refuses.
    Sends the key in PREFECT_API_AUTH_STRING, if there is one."""
    import httpx
    from prefect.exceptions import PrefectException

    address, key = os.environ["PREFECT_API_URL"], os.environ.get("PREFECT_API_AUTH_STRING", "")
    try:
        with prefect_client(address, key, within_s=ANSWERS_WITHIN_S, retries=TRIES_AGAIN) as client:
            yield client
    except (httpx.HTTPStatusError, PrefectException) as refused:
        what = refused.response.status_code if isinstance(refused, httpx.HTTPStatusError) else type(refused).__name__
        raise InputError(f"the Prefect server at {address} refuses a request ({what}): see its log, then try again") from refused
    except httpx.HTTPError as error:
        raise InputError(
            f"the Prefect server at {address} does not answer ({error}): the machine may be very busy; processes that were "
            "started keep running, so try again, and see its log"
        ) from error


def _automation(name: str, description: str, trigger: Mapping[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "description": description, "enabled": True, "trigger": dict(trigger), "actions": actions}


def _notification_block(client: "SyncPrefectClient") -> str | None:
    blocks = read_all(client.read_block_documents, include_secrets=False)
    return next((str(each.id) for each in blocks if each.name == NOTIFIED), None)


def main() -> int:
    try:
        if not (api := os.environ.get("PREFECT_API_URL")):
            raise InputError("set PREFECT_API_URL to the server's address, such as http://server.internal:4200/api")
        check_address(api)
        with server_client() as client:
            for line in apply(client) or ["all are there"]:
                print(f"automations     {line}")
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
