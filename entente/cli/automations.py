"""Automations and limits of Prefect's server. `entente up` creates them, and updates those that differ.

    python -m entente.cli.automations    creates and updates those of PREFECT_API_URL, where nobody runs `entente up`

An automation only reports: a run without heartbeats, a run to recover, an alert to pass on. flows/recover_training.py reads the
run's files and decides what to do. An automation that a user switched off stays off.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

from entente.cli.prefect_server import check_address
from entente.cli.server_key import open_url
from entente.telemetry.errors import InputError

WHOLE_MACHINE = "whole-machine"
"""Work queue of prefect.yaml for runs that use all cores; one run at a time."""
SILENT_S = 120
"""Seconds without a heartbeat, of which four were due, until a run counts as crashed."""
NOTIFIED = "entente-alerts"
"""Name of the notification block that alerts are sent to, if the user has made one."""
RECOVERED = ("prefect.flow-run.Crashed", "prefect.flow-run.Failed", "prefect.flow-run.TimedOut")
"""Events after which a training run is recovered."""

Ask = Callable[..., Any]
"""`ask(path, body, method)` returns the server's answer."""
ANSWERS_WITHIN_S = 60.0
"""Seconds in which the server must answer: on a busy machine SQLite may be locked for many seconds."""


def apply(ask: Ask) -> list[str]:
    """Create and update the server's automations; one line for each that was changed."""
    deployments = {f"{each['entrypoint']}": each["id"] for each in ask("deployments/filter", {})}
    recovery = deployments.get("flows/recover_training.py:recover_training")
    wanted = [crash_silent_runs()]
    if recovery:
        wanted.append(recover_lost_runs(recovery))
    wanted += pass_on_alerts(_notification_block(ask))
    there = {each["name"]: each for each in ask("automations/filter", {})}
    lines = []
    for each in wanted:
        found = there.get(each["name"])
        if found is None:
            ask("automations/", each)
            lines.append(f"{each['name']}: made")
        elif not _contains(found, {name: value for name, value in each.items() if name != "enabled"}):
            ask(f"automations/{found['id']}", each | {"enabled": found["enabled"]}, "PUT")
            lines.append(f"{each['name']}: brought up to date")
    return lines


def limit_queue(ask: Ask, pool: str) -> bool:
    """Limit the queue for whole machines to one run, unless it has a limit. Returns whether it was changed."""
    for queue in ask(f"work_pools/{pool}/queues/filter", {}):
        if queue["name"] == WHOLE_MACHINE and queue["concurrency_limit"] is None:
            ask(f"work_pools/{pool}/queues/{WHOLE_MACHINE}", {"concurrency_limit": 1}, "PATCH")
            return True
    return False


def crash_silent_runs() -> dict[str, Any]:
    """A flow run whose heartbeats stop counts as crashed: its slots are freed, and the recovery automation sees it."""
    ends = [f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "TimedOut", "Crashed", "Cancelled", "Paused")]
    return _automation(
        "Entente: a run without a sign of life has crashed",
        f"Runs give one every 30 s; after {SILENT_S} s without any, the host or the process is lost, or stopped.",
        {
            "type": "event",
            "posture": "Proactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
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
    """After a training run crashed or failed, the deployment with id `recovery` runs."""
    flow_run = {"__prefect_kind": "jinja", "template": "{{ event.resource.id.split('.')[-1] }}"}
    return _automation(
        "Entente: look after a training run that was lost",
        "Starts recover-training, which goes by the run's files: it resumes the run, leaves it, or tells that it cannot go on.",
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
    """Alerts, and work pools without a worker, go to the notification block. Without one the server's page shows them."""

    def send(subject: str, body: str) -> list[dict[str, Any]]:
        if block is None:
            return [{"type": "do-nothing"}]
        return [{"type": "send-notification", "block_document_id": block, "subject": subject, "body": body}]

    where = (
        f"Sent to the notification block '{NOTIFIED}'" if block else f"Make a notification block named '{NOTIFIED}' to be told"
    )
    reactive = {"type": "event", "posture": "Reactive", "threshold": 1, "within": 0}
    return [
        _automation(
            "Entente: an alert of a run",
            f"Something began to be wrong: stalled, not finite, no progress, stale, disk, lost. {where}.",
            reactive | {"match": {"prefect.resource.id": "entente.run.*"}, "expect": ["entente.alert.*"]},
            send("Entente: {{ event.event }}", "{{ event.payload.sentence }}"),
        ),
        _automation(
            "Entente: a work pool lost its workers",
            f"Nothing that is scheduled there will begin. {where}.",
            reactive | {"match": {"prefect.resource.id": "prefect.work-pool.*"}, "expect": ["prefect.work-pool.not-ready"]},
            send("Entente: no worker is left", "Work pool {{ event.resource.name }} has no worker: start one with `entente up`."),
        ),
    ]


def asker(api: str) -> Ask:
    """A function that calls the server at `api` with the key in PREFECT_API_AUTH_STRING, if there is one.

    It raises `InputError` where the server does not answer within `ANSWERS_WITHIN_S`.
    """

    headers = {"content-type": "application/json"}
    if key := os.environ.get("PREFECT_API_AUTH_STRING"):
        headers["authorization"] = f"Basic {b64encode(key.encode()).decode()}"

    def ask(path: str, body: Mapping[str, Any] | None = None, method: str = "POST", tries: int = 5) -> Any:
        request = urllib.request.Request(
            f"{api}/{path}",
            data=json.dumps(body or {}).encode() if method != "GET" else None,
            headers=headers,
            method=method,
        )
        try:
            with open_url(request, ANSWERS_WITHIN_S) as answer:
                content = answer.read()
        except urllib.error.HTTPError as refused:
            # 503: SQLite is locked for some seconds on a busy machine.
            if refused.code != 503 or tries == 1:
                raise
            time.sleep(1)
            return ask(path, body, method, tries - 1)
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise InputError(
                f"the Prefect server at {api} does not answer ({reason}): the machine may be very busy; processes that were "
                "started keep running, so try again, and see its log"
            ) from error
        return json.loads(content) if content else None

    return ask


def _automation(name: str, description: str, trigger: Mapping[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "description": description, "enabled": True, "trigger": dict(trigger), "actions": actions}


def _notification_block(ask: Ask) -> str | None:
    blocks = ask("block_documents/filter", {"include_secrets": False})
    return next((each["id"] for each in blocks if each["name"] == NOTIFIED), None)


def _contains(found: Any, wanted: Any) -> bool:
    """Whether the server's object has all the wanted values; the server adds fields that were left out."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(name in found and _contains(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        if isinstance(found, list) and all(isinstance(each, str) for each in wanted):
            return sorted(found) == sorted(wanted)
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_contains, found, wanted))
    return found == wanted


def main() -> int:
    """The command in the module's docstring; the server's key is in PREFECT_API_AUTH_STRING. Returns the exit code."""
    try:
        if not (api := os.environ.get("PREFECT_API_URL")):
            raise InputError("set PREFECT_API_URL to the server's address, such as http://server.internal:4200/api")
        check_address(api)
        for line in apply(asker(api)) or ["all are there"]:
            print(f"automations     {line}")
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
