"""Keeps web pages in a browser on this machine away from vLLM's server, which imports it by name in its own environment.

vLLM checks neither Host nor, in older releases, Origin: without a key any open page could sample and load adapters.
"""

import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_OF_SERVER = "VLLM_API_KEY"
"""Variable of the server's key. An argument would be visible to every user of the machine."""
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class PageGate:
    """ASGI middleware: refuses requests with an Origin, which only pages send, and, if the server has no key, those that reach it
    on loopback under another name (DNS rebinding). A page does not know a key."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan" or not (why := _refusal(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": json.dumps({"error": {"message": why, "code": 403}}).encode()})


def _refusal(scope: _Scope) -> str:
    """Why the request is refused; empty if it is not."""
    headers = dict(scope["headers"])
    if b"origin" in headers:
        return "a page in a browser may not use this server"
    address, _ = scope.get("server") or ("", 0)
    host = _name(headers.get(b"host", b"").decode("latin-1"))
    if os.environ.get(KEY_OF_SERVER) or not _is_loopback(address) or _is_loopback(host):
        return ""
    return f"this server has no key, so it answers to localhost only, not to {host[:100]!r}"


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
