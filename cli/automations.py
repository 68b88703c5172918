"""What Prefect's server does by itself for Entente: automations and limits, put there by `entente up` and only changed where they
differ.

They only tell: a run that gave no sign of life, a run to look after, an alert to pass on. What is then done is decided by files
(flows/recover_training.py). An automation that somebody switched off stays off.
"""

import json
import os
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

from telemetry.errors import InputError

WHOLE_MACHINE = "whole-machine"
"""Work queue of prefect.yaml for what wants all cores; one run at a time."""
SILENT_S = 120
"""Seconds without a sign of life, of which there should have been four, until a run counts as crashed."""
NOTIFIED = "entente-alerts"
"""Name of the notification block that alerts are sent to, where somebody made one."""
RECOVERED = ("prefect.flow-run.Crashed", "prefect.flow-run.Failed", "prefect.flow-run.TimedOut")
"""Events of a training run that is looked after."""

Ask = Callable[..., Any]
"""`ask(path, body, method)`: what the server answers."""
ANSWERS_WITHIN_S = 60.0
"""Seconds in which the server must answer: SQLite may be locked for many of them while a machine is busy."""


def apply(ask: Ask) -> list[str]:
    """Bring the server's automations and limits to what they should be; what was done, a line each."""
    deployments = {f"{each['entrypoint']}": each["id"] for each in ask("deployments/filter", {})}
    recovery = deployments.get("flows/recover_training.py:recover_training")
    wanted = [no_sign_of_life()]
    if recovery:
        wanted.append(look_after(recovery))
    wanted += told(_notification_block(ask))
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
    """Let one run of the queue for whole machines go at a time, unless somebody set another limit; whether that was done."""
    for queue in ask(f"work_pools/{pool}/queues/filter", {}):
        if queue["name"] == WHOLE_MACHINE and queue["concurrency_limit"] is None:
            ask(f"work_pools/{pool}/queues/{WHOLE_MACHINE}", {"concurrency_limit": 1}, "PATCH")
            return True
    return False


def no_sign_of_life() -> dict[str, Any]:
    """A flow run that began and is heard of no longer counts as crashed: its slots are free, and the next rule sees it."""
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


def look_after(recovery: str) -> dict[str, Any]:
    """A training run that ended badly is looked after by the deployment `recovery`."""
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


def told(block: str | None) -> list[dict[str, Any]]:
    """Alerts, and pools that lose their last worker, go to the notification block; without one they are kept on the page."""

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
    """Asks the server at `api`, with the key that PREFECT_API_AUTH_STRING holds, if any; what it does not answer within
    `ANSWERS_WITHIN_S` is an `InputError` with a sentence."""

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
            with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S) as answer:
                told = answer.read()
        except urllib.error.HTTPError as refused:
            # On a busy machine SQLite may be locked for some seconds; the server then says that it is not available.
            if refused.code != 503 or tries == 1:
                raise
            time.sleep(1)
            return ask(path, body, method, tries - 1)
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise InputError(
                f"the Prefect server at {api} does not answer ({reason}): the machine may be very busy; what is begun stays, so "
                "try again, and see its log"
            ) from error
        return json.loads(told) if told else None

    return ask


def _automation(name: str, description: str, trigger: Mapping[str, Any], actions: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "description": description, "enabled": True, "trigger": dict(trigger), "actions": actions}


def _notification_block(ask: Ask) -> str | None:
    blocks = ask("block_documents/filter", {"include_secrets": False})
    return next((each["id"] for each in blocks if each["name"] == NOTIFIED), None)


def _contains(found: Any, wanted: Any) -> bool:
    """Whether what the server has says all that is wanted; it adds what was left out."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(name in found and _contains(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        if isinstance(found, list) and all(isinstance(each, str) for each in wanted):
            return sorted(found) == sorted(wanted)
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_contains, found, wanted))
    return found == wanted
