"""No page in a browser on this machine is a client of vLLM's server."""

import asyncio
from typing import Any

import pytest

from entente.inference.page_gate import KEY_OF_SERVER, PageGate


async def _serves(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def answer(address: str = "127.0.0.1", kind: str = "http", path: str = "/adapters", **headers: str) -> Any:
    """What the server answers: an HTTP status, or what becomes of a web socket."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "server": (address, 8000), "path": path, "headers": encoded}
    asyncio.run(PageGate(_serves)(scope, None, send))  # type: ignore[arg-type]
    return sent[0].get("status", sent[0]["type"])


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_OF_SERVER, raising=False)


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000", "127.0.0.2"])
def test_programs_on_this_machine_are_answered(host: str):
    assert answer(host=host) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000", "origin": "http://elsewhere.example"},
        {"host": "127.0.0.1:8000", "origin": "null"},
        {"host": "elsewhere.example:8000"},
        {"host": "127.0.0.1.elsewhere.example"},
        {"host": "localhost.elsewhere.example"},
        {"host": "[elsewhere.example"},
        {},
    ],
    ids=str,
)
def test_pages_and_names_that_lead_here_are_refused(headers: dict[str, str]):
    assert answer(**headers) == answer("::1", **headers) == 403
    assert answer(kind="websocket", **headers) == "websocket.close"


def test_with_a_key_or_on_another_address_the_name_is_the_networks_affair_but_no_page_is_a_client(
    monkeypatch: pytest.MonkeyPatch,
):
    assert answer("10.0.0.7", host="gpu.example") == 200
    assert answer("10.0.0.7", host="gpu.example", origin="http://gpu.example") == 403
    monkeypatch.setenv(KEY_OF_SERVER, "a key")
    assert answer(host="gpu.example", authorization="Bearer a key") == 200
    assert answer(host="gpu.example", authorization="Bearer a key", origin="http://gpu.example") == 403


def test_a_server_with_a_key_asks_for_it_on_every_route_except_health_and_metrics(monkeypatch: pytest.MonkeyPatch):
    """vLLM asks for it on some: without a key anybody could sample by /invocations, and remove a run's adapter by /adapters."""
    monkeypatch.setenv(KEY_OF_SERVER, "a key")
    for path in ("/adapters", "/adapters/v1-0123abcd", "/invocations", "/v1/models", "/health/../adapters"):
        assert answer(path=path) == answer("10.0.0.7", path=path) == answer(path=path, authorization="Bearer another") == 401
        assert answer(path=path, authorization="bearer a key") == 200
    assert answer(path="/health") == answer(path="/metrics") == 200
    assert answer(kind="websocket") == "websocket.close"
