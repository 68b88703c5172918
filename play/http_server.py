"""What the HTTP servers of this project share: their socket, the bounds of connections, and their end by a signal."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from play.http_bounds import BoundedConnection
from telemetry.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(host: str, port: int, key: str | None) -> socket.socket:
    """A listening socket, opened before the engine starts.

    Raises:
        InputError: the port is taken, or the address is not loopback and there is no key.
    """
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


class _Server(uvicorn.Server):
    """Says when it begins to shut down."""

    def __init__(self, config: uvicorn.Config, on_shutdown: Callable[[], object] | None) -> None:
        super().__init__(config)
        self._on_shutdown = on_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_shutdown is not None:
            self._on_shutdown()
        await super().shutdown(sockets)


def make_server(
    app: FastAPI,
    *,
    drain_s: float,
    connection: type[BoundedConnection] = BoundedConnection,
    on_shutdown: Callable[[], object] | None = None,
) -> uvicorn.Server:
    """A server of the app. Requests in flight get `drain_s` seconds to finish after a termination signal.

    Args:
        on_shutdown: called after such a signal, so that requests that wait can be answered: uvicorn reports a wait that it
            cancels as an error.
    """
    config = uvicorn.Config(
        app,
        http=connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    return _Server(config, on_shutdown)


@contextmanager
def signals_end_here() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after it has shut down, so that the caller can close what it serves."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGTERM, signal.SIGINT) if in_main_thread else ()
    handlers = {number: signal.signal(number, lambda *_: None) for number in signals}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def serve(server: uvicorn.Server, listener: socket.socket, *, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM, Ctrl-C or `server.should_exit`, on the event loop of the caller."""
    asyncio.get_running_loop().call_soon(on_ready)
    with signals_end_here():
        await server.serve(sockets=[listener])
