"""The automations as data, and how they are brought to a server; a real server takes them in tests/cli/test_up.py."""

from typing import Any

import pytest

from entente.cli.automations import (
    NOTIFIED,
    WHOLE_MACHINE,
    apply,
    crash_silent_runs,
    limit_queue,
    pass_on_alerts,
)


class Server:
    """Answers as Prefect's does, as far as it is asked."""

    def __init__(self, **there: list[dict[str, Any]]) -> None:
        self.there, self.changed = there, list[tuple[str, str, Any]]()

    def __call__(self, path: str, body: Any = None, method: str = "POST") -> Any:
        if path.endswith("/filter"):
            return self.there.get(path.split("/")[-2], [])
        self.changed.append((method, path, body))
        return None


def test_what_is_there_and_the_same_is_left_alone_whatever_else_the_server_says_of_it():
    deployment = {"entrypoint": "flows/recover_training.py:recover_training", "id": "d1"}
    server = Server(deployments=[deployment])
    assert len(apply(server)) == 4
    made = [body | {"id": str(number), "tags": [], "enabled": True} for number, (_, _, body) in enumerate(server.changed)]
    again = Server(deployments=[deployment], automations=made)
    assert apply(again) == [] and again.changed == []


def test_what_differs_is_brought_up_to_date_and_stays_switched_off():
    stale = crash_silent_runs() | {"id": "7", "enabled": False, "description": "of an earlier version"}
    server = Server(automations=[stale])
    assert apply(server)[0].endswith("brought up to date")
    (method, path, body) = server.changed[0]
    assert (method, path, body["enabled"], body["description"]) == (
        "PUT",
        "automations/7",
        False,
        crash_silent_runs()["description"],
    )


def test_without_the_recovery_s_deployment_no_automation_names_it():
    server = Server()
    apply(server)
    assert not any("look after" in body["name"] for _, _, body in server.changed)


@pytest.mark.parametrize("block", [None, "b1"], ids=["nobody is told", "a block is there"])
def test_alerts_go_to_a_notification_block_if_there_is_one(block: str | None):
    blocks = [{"name": "other", "id": "b0"}, *([{"name": NOTIFIED, "id": block}] if block else [])]
    server = Server(block_documents=blocks)
    apply(server)
    alerts = [body for _, _, body in server.changed if body["name"] in {each["name"] for each in pass_on_alerts(block)}]
    kinds = {action["type"] for each in alerts for action in each["actions"]}
    assert kinds == ({"send-notification"} if block else {"do-nothing"}) and len(alerts) == 2
    assert all(action.get("block_document_id") == block for each in alerts for action in each["actions"])


@pytest.mark.parametrize(("limit", "set_now"), [(None, True), (3, False)], ids=["no limit yet", "somebody's limit"])
def test_the_queue_for_whole_machines_is_limited_unless_somebody_did(limit: int | None, set_now: bool):
    server = Server(queues=[{"name": WHOLE_MACHINE, "concurrency_limit": limit}])
    assert limit_queue(server, "local") == set_now and bool(server.changed) == set_now
