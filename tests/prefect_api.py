"""What a real Prefect server is asked by tests, through Prefect's client."""

from collections.abc import Callable
from typing import Any


def asker(api: str, key: str = "") -> Callable[..., Any]:
    """`ask(path, body, method)` returns the server's answer; it raises `httpx.HTTPError`."""
    from prefect.client.orchestration import SyncPrefectClient

    def ask(path: str, body: Any = None, method: Any = "POST") -> Any:
        with SyncPrefectClient(api, auth_string=key or None) as client:
            where: Any = f"/{path}"
            answer = client.request(method, where, **({} if method == "GET" else {"json": body or {}}))
        return answer.json() if answer.content else None

    return ask
