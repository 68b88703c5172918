"""Bounds of a worker's HTTP server: connections, time for a header and a body, bytes in flight.

uvicorn bounds only the idle time between two requests. `BoundedConnection` wraps uvicorn's HTTP protocol and limits the time and
size of a header. `RequestReader` wraps the app and reads each body completely, within a time and a budget of bytes. Every refusal
has a status and a sentence. A client that disconnects is not an error.
"""

import asyncio
import resource
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_TIMEOUT_S = 10.0
"""Seconds for a complete header, from the connection's start or the first byte of a later request."""
BODY_TIMEOUT_S = 30.0
"""Seconds for a complete body: 8 MiB at 280 KB a second. A usual request has a few kilobytes."""
MAX_HEAD = 1 << 16
"""Longest header, bytes; one read from the socket may exceed it."""
MAX_CONNECTIONS = 4608
"""Most open connections."""
MAX_BYTES_IN_FLIGHT = 64 << 20
"""Total bytes of the bodies that are being read or answered."""
_CONNECTION = "bounded_connection"


def error_response(
    status: int, kind: str, text: str, more: Mapping[str, int | str] = MappingProxyType({}), *, close: bool = False
) -> JSONResponse:
    """A refusal as JSON; `close` also closes the connection."""
    headers = {"connection": "close"} if close else None
    return JSONResponse({"sentence": text, "kind": kind, **more}, status_code=status, headers=headers)


class BoundedConnection(asyncio.Protocol):
    """uvicorn's protocol for one connection, with a timer for each header and for the rest of a refused body."""

    say = staticmethod(error_response)
    """Makes its refusals; a server whose clients expect another form has a class of its own."""

    def __init__(
        self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        make: Any = AutoHTTPProtocol  # uvicorn's protocols take these arguments, but their common type does not declare them
        self._inner: asyncio.Protocol = make(
            config=config, server_state=server_state, app_state=app_state | {_CONNECTION: self}, _loop=_loop
        )
        self._held: set[Any] = server_state.connections
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._answering = 0
        self._refused = self._discarding = False
        self._head = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or refuse it if there are too many."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport has the methods but not the base class
        most = most_connections()
        if len(self._held) >= most:
            self._end(429, "busy", f"this server holds {most} connections already: try again")
            return
        self._inner.connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Pass bytes to uvicorn, unless the header is too long."""
        if self._refused:
            return
        if not self._answering and not self._discarding:
            if self._clock is None:
                self._await_head()
            if self._head > MAX_HEAD:
                self._end(431, "too_long", f"a request's header may have at most {MAX_HEAD} bytes")
                return
            self._head += len(data)
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the event to uvicorn."""
        return None if self._refused else self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass the event to uvicorn, and stop the timer."""
        self._stop_clock()
        if not self._refused or self._inner in self._held:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Pass the event to uvicorn."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass the event to uvicorn."""
        self._inner.resume_writing()

    def begin_request(self) -> None:
        """The header is complete, and the app handles the request."""
        self._answering += 1
        self._discarding = False
        self._stop_clock()

    def end_request(self, *, whole: bool) -> None:
        """The app has answered; `whole`: the body was read completely. uvicorn bounds the time until the next request."""
        self._answering -= 1
        if not whole and not self._answering and self._transport is not None and not self._refused:
            # The client has its answer; the rest of the body is discarded until the timer closes the connection.
            self._discarding = True
            self._stop_clock()
            self._clock = self._loop.call_later(HEAD_TIMEOUT_S, self._transport.close)

    def _await_head(self) -> None:
        self._head = 0
        self._clock = self._loop.call_later(
            HEAD_TIMEOUT_S, self._end, 408, "slow", f"the header of a request must be whole within {HEAD_TIMEOUT_S:g} s"
        )

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _end(self, status: int, kind: str, text: str) -> None:
        self._refused = True
        assert self._transport is not None
        refusal = self.say(status, kind, text, close=True)
        head = b"".join(b"%s: %s\r\n" % header for header in refusal.raw_headers)
        self._transport.write(b"HTTP/1.1 %d Refused\r\n" % status + head + b"\r\n" + bytes(refusal.body))
        self._transport.close()


class RequestReader:
    """ASGI middleware that reads each body completely before the app handles the request.

    The body counts as bytes in flight until the request is answered.
    """

    def __init__(
        self, app: ASGIApp, refuse: Callable[[Scope], Response | None], say: Callable[..., Response] = error_response
    ) -> None:
        """`refuse` checks a request's header; it must refuse a body without a content length. `say` makes other refusals."""
        self._app, self._refuse, self._say = app, refuse, say
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        connection: BoundedConnection | None = scope.get("state", {}).get(_CONNECTION)
        if connection is not None:
            connection.begin_request()
        whole = False
        try:
            refusal = self._refuse(scope)
            whole = refusal is None and await self._serve(scope, receive, send)
            if refusal is not None:
                await refusal(scope, receive, send)
        finally:
            if connection is not None:
                connection.end_request(whole=whole)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Serve a request whose header was accepted; returns whether its body was read completely."""
        length = int(dict(scope["headers"]).get(b"content-length", b"0"))
        if self._bytes + length > MAX_BYTES_IN_FLIGHT:
            text = f"requests of nearly {MAX_BYTES_IN_FLIGHT:,} bytes are in flight here: try again"
            await self._say(429, "busy", text)(scope, receive, send)
            return False
        self._bytes += length
        try:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    body = await _read(receive)
            except TimeoutError:
                text = f"the body of a request must be whole within {BODY_TIMEOUT_S:g} s"
                await self._say(408, "slow", text, close=True)(scope, receive, send)
                return False
            if body is None:  # the client disconnected
                return False
            given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
            del body

            async def replay() -> Message:
                return given.pop() if given else await receive()

            await self._app(scope, replay, send)
            return True
        finally:
            self._bytes -= length


async def _read(receive: Receive) -> bytes | None:
    """The complete body; None if the client disconnected before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def most_connections() -> int:
    """Most connections of this process: `MAX_CONNECTIONS`, or fewer if its limit of open files is low."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(16, limit - 256))
