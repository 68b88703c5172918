"""Keeps web pages in a browser on this machine, and all who lack the key, away from vLLM's server, which imports this module by
name in its own environment.

vLLM checks neither Host nor, in older releases, Origin: without a key any open page could sample and load adapters. It asks for
a key on some routes only: without one /invocations samples, and /adapters loads and removes adapters.
"""

import ipaddress
import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_OF_SERVER = "VLLM_API_KEY"
"""Variable of the server's key. An argument would be visible to every user of the machine."""
_KEYLESS = ("/health", "/metrics")
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class PageGate:
    """ASGI middleware: refuses requests with an Origin, which only pages send; those without the server's key, except for health
    and metrics; and, if it has none, those that reach it on loopback under another name (DNS rebinding)."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        status, why = (0, "") if scope["type"] == "lifespan" else _refusal(scope)
        if not why:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": json.dumps({"error": {"message": why, "code": status}}).encode()})


def _refusal(scope: _Scope) -> tuple[int, str]:
    """Status, and why the request is refused; empty if it is not."""
    headers = dict(scope["headers"])
    if b"origin" in headers:
        return 403, "a page in a browser may not use this server"
    if key := os.environ.get(KEY_OF_SERVER):
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        has_key = scheme.lower() == b"bearer" and secrets.compare_digest(sent, key.encode())
        return 401, "" if has_key or scope["path"] in _KEYLESS else "the server's key is missing or wrong"
    address, _ = scope.get("server") or ("", 0)
    host = _name(headers.get(b"host", b"").decode("latin-1"))
    if not _is_loopback(address) or _is_loopback(host):
        return 403, ""
    return 403, f"this server has no key, so it answers to localhost only, not to {host[:100]!r}"


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
