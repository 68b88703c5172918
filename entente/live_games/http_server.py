"""Common parts of the HTTP servers: the socket, header checks, and shutdown on a signal.

Keys are compared in constant time. A server reads a body only after it has checked key and length. uvicorn limits headers and
connections. On an untrusted network, put a reverse proxy in front.
"""

import asyncio
import hmac
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from entente.telemetry.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 768
"""Below the usual limit of 1,024 open files; uvicorn answers further connections with 503."""
MAX_HEAD = 1 << 16
"""Maximum size of the headers, bytes."""

Headers = Mapping[bytes, bytes]


def bind(host: str, port: int, key: str | None) -> socket.socket:
    """A listening socket. Raises InputError if the port is taken, or the address is not loopback and there is no key."""
    if host not in LOOPBACK and not key:
        raise InputError(f"a server on {host} needs a key: set the key variable, or listen on 127.0.0.1")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    listener.listen(512)
    return listener


def headers_of(scope: Scope) -> Headers:
    """The headers by lower-case name; the last of duplicates."""
    return dict(scope["headers"])


def has_key(headers: Headers, key: str) -> bool:
    """Whether the request has the header `Authorization: Bearer KEY`."""
    return hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + key.encode())


def foreign_header(headers: Headers, own: Collection[str]) -> Literal["host", "origin"] | None:
    """The header that names another host or page (DNS rebinding, cross-site requests). `own`: allowed Hosts, the page's first."""
    names = [each.encode() for name in own for each in (name, name.removesuffix(":80"))]  # browsers leave out port 80
    if headers.get(b"host", b"") not in names:
        return "host"
    if headers.get(b"origin", b"http://" + names[0]) not in [b"http://" + name for name in names]:
        return "origin"
    return None


def is_too_long(scope: Scope, headers: Headers, most: int) -> bool:
    """Whether the body has more than `most` bytes, or no Content-Length."""
    length = headers.get(b"content-length", b"" if scope["method"] == "POST" else b"0")
    return not length.isdigit() or int(length) > most or b"transfer-encoding" in headers


def new_key() -> str:
    return secrets.token_urlsafe(24)


def sentence(status: int, text: str, **more: Any) -> JSONResponse:
    return JSONResponse({"error": text, **more}, status_code=status)


def page_headers(nonce: str, *, forms: str = "'self'") -> dict[str, str]:
    """Of a page whose script and style have the nonce: nothing from elsewhere, nothing inline, no frame around it."""
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        f"img-src data:; connect-src 'self'; base-uri 'none'; form-action {forms}; frame-ancestors 'none'"
    )
    # With no-referrer a browser would send its own form's POST with the Origin "null".
    headers = {"referrer-policy": "same-origin", "cache-control": "no-store", "x-content-type-options": "nosniff"}
    return headers | {"content-security-policy": policy}


def refusal(scope: Scope, *, key: str, address: str, command: str, most: int) -> Response | None:
    """The answer to a request that a page of this machine does not take: another Host or Origin, no key, a body of more than
    `most` bytes. The key is the query's `key`, or the header x-entente-key; `command` prints the address."""
    headers = headers_of(scope)
    match foreign_header(headers, (address, f"localhost:{address.rpartition(':')[2]}")):
        case "host":
            return sentence(403, f"this page is served on this machine only: open the address that `{command}` printed")
        case "origin":
            return sentence(403, f"the request comes from another page: open the address that `{command}` printed")
    query = scope["query_string"].decode("latin-1")
    sent_key = headers.get(b"x-entente-key") or next(
        (part[4:].encode("latin-1") for part in query.split("&") if part.startswith("key=")), b""
    )
    if not hmac.compare_digest(sent_key, key.encode()):
        return sentence(403, f"the key of this address is missing or old: open the address that `{command}` printed last")
    if is_too_long(scope, headers, most):
        return sentence(413, f"a request may have at most {most} bytes, and must state its length")
    return None


class CheckedHeaders:
    """ASGI middleware that rejects requests by their headers, before the body is read."""

    def __init__(self, app: ASGIApp, refuse: Callable[[Scope], Response | None]) -> None:
        """`refuse` must reject a body without Content-Length; see `is_too_long`."""
        self._app, self._refuse = app, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """uvicorn discards the body of a rejected request."""
        refusal = self._refuse(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_shutdown: Callable[[], object] | None) -> None:
        super().__init__(config)
        self._on_shutdown = on_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_shutdown is not None:
            self._on_shutdown()
        await super().shutdown(sockets)


def make_server(app: FastAPI, *, drain_s: float, on_shutdown: Callable[[], object] | None = None) -> uvicorn.Server:
    """After a termination signal, requests in flight get `drain_s` seconds to finish. `on_shutdown` is called first, to answer
    waiting requests: uvicorn logs an error for requests that it cancels."""
    config = uvicorn.Config(
        app,
        http="h11",
        h11_max_incomplete_event_size=MAX_HEAD,
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return _Server(config, on_shutdown)


@contextmanager
def signals_end_here() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after its shutdown, so that the caller can clean up.

    Nor does the wakeup pipe hear of it: its reader may be late, and would take it for one that came after the shutdown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wakeup = signal.set_wakeup_fd(-1)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)


async def serve(server: uvicorn.Server, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM, Ctrl-C or `server.should_exit`."""
    asyncio.get_running_loop().call_soon(on_ready)
    with signals_end_here():
        await server.serve(sockets=[listener])
