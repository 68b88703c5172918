"""The automations as data, and how they are brought to a server; a real server takes them in tests/cli/test_up.py."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import Flow
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.states import Cancelled, Completed, Crashed, Failed, Paused, Suspended

from entente.prefect_server.automations import (
    NOTIFIED,
    WHOLE_MACHINE,
    apply,
    crash_silent_runs,
    limit_queue,
    pass_on_alerts,
)
from flows.build_state_cache import build_state_cache
from flows.evaluate_policy import evaluate_policy
from flows.recover_training import recover_training
from flows.train_policy import train_policy

RECOVERY = SimpleNamespace(entrypoint="flows/recover_training.py:recover_training", id=UUID(int=1))


class Server:
    """Prefect's client as far as it is asked: what is there, two at a time, and what was made or changed."""

    def __init__(self, **there: list[Any]) -> None:
        self.there, self.made, self.changed = there, list[AutomationCore](), list[tuple[Any, Any]]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("read_"):
            return lambda offset=0, **_: self.there.get(name.removeprefix("read_"), [])[offset : offset + 2]
        raise AttributeError(name)

    def create_automation(self, automation: AutomationCore) -> None:
        self.made.append(automation)

    def update_automation(self, number: UUID, automation: AutomationCore) -> None:
        self.changed.append((number, automation))

    def update_work_queue(self, number: UUID, **values: Any) -> None:
        self.changed.append((number, values))


def stored(*automations: AutomationCore) -> list[Automation]:
    return [Automation(id=UUID(int=number), **each.model_dump()) for number, each in enumerate(automations)]


def test_what_is_there_and_the_same_is_left_alone():
    server: Any = Server(deployments=[RECOVERY])
    assert len(apply(server)) == len(server.made) == 4
    again: Any = Server(deployments=[RECOVERY], automations=stored(*server.made))
    assert apply(again) == [] and again.made == again.changed == []


def test_what_differs_is_brought_up_to_date_and_stays_switched_off():
    stale = AutomationCore.model_validate(crash_silent_runs() | {"enabled": False, "description": "of an earlier version"})
    server: Any = Server(automations=stored(stale))
    assert apply(server)[0].endswith("brought up to date")
    ((number, now),) = server.changed
    assert (number, now.enabled, now.description) == (UUID(int=0), False, crash_silent_runs()["description"])


@pytest.mark.parametrize("state", [Completed, Failed, Crashed, Cancelled, Paused, Suspended])
def test_a_run_that_prefect_ended_is_not_taken_for_a_silent_one(state: Any):
    assert f"prefect.flow-run.{state().name}" in crash_silent_runs()["trigger"]["expect"]


@pytest.mark.parametrize("flow", [build_state_cache, evaluate_policy, recover_training, train_policy, Flow(print, name="other")])
def test_silence_is_noticed_of_this_project_s_flows_alone(flow: Any):
    trigger = EventTrigger.model_validate(AutomationCore.model_validate(crash_silent_runs()).trigger.model_dump())
    related = {"prefect.resource.id": "prefect.flow.1", "prefect.resource.role": "flow", "prefect.resource.name": flow.name}
    beat = ReceivedEvent(
        event="prefect.flow-run.heartbeat",
        resource={"prefect.resource.id": "prefect.flow-run.1"},
        related=[related],
        id=uuid4(),
        occurred=datetime.now(UTC),
    )
    assert trigger.covers(beat) == (flow.name != "other")


def test_without_the_recovery_s_deployment_no_automation_names_it():
    server: Any = Server()
    apply(server)
    assert server.made and not any("look after" in each.name for each in server.made)


@pytest.mark.parametrize("block", [None, UUID(int=7)], ids=["nobody is told", "a block is there"])
def test_alerts_go_to_a_notification_block_if_there_is_one(block: UUID | None):
    blocks = [SimpleNamespace(name="other", id=UUID(int=6)), *([SimpleNamespace(name=NOTIFIED, id=block)] if block else [])]
    server: Any = Server(block_documents=blocks)
    apply(server)
    alerts = [each for each in server.made if each.name in {own["name"] for own in pass_on_alerts(None)}]
    actions = [action for each in alerts for action in each.actions]
    assert {action.type for action in actions} == ({"send-notification"} if block else {"do-nothing"}) and len(alerts) == 2
    assert all(getattr(action, "block_document_id", None) == block for action in actions)


@pytest.mark.parametrize(("limit", "set_now"), [(None, True), (3, False)], ids=["no limit yet", "somebody's limit"])
def test_the_queue_for_whole_machines_is_limited_unless_somebody_did(limit: int | None, set_now: bool):
    queue = SimpleNamespace(name=WHOLE_MACHINE, concurrency_limit=limit, id=UUID(int=2))
    server: Any = Server(work_queues=[queue])
    assert limit_queue(server, "local") == set_now
    assert server.changed == ([(queue.id, {"concurrency_limit": 1})] if set_now else [])
