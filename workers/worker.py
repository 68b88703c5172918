"""The inference worker: one engine behind a small authenticated HTTP app.

Loopback unless a key is set; the key is compared in constant time; adapters load from under one folder only, and are looked at
before the engine sees them; bodies are bounded and checked; a page in a browser is no client. Every request id is drawn once.
vLLM's own server and its development routes are not part of it.

What it answers: 200; 400 malformed; 401 key; 403 path; 408 too slow; 409 refused, with its kind; 410 the version is not served,
with the newest that is; 413 and 431 too long; 429 too many in flight; 503 no engine now. Each but the first is a error_response and a
kind.
"""

import asyncio
import hmac
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from inference.engine import Engine
from inference.host import EngineHost
from telemetry.errors import DataError, EngineLostError, EntenteError, InputError, VersionGoneError
from telemetry.log_tail import LogTail
from workers.http_bounds import BoundedConnection, RequestReader, error_response
from workers.wire import CONTENT_TYPE, MAX_BODY, MAX_JSON, version_fields
from workers.worker_memory import Busy, IdConflict
from workers.worker_metrics import CONTENT_TYPE as METRICS_TYPE
from workers.worker_service import ForbiddenPath, PublishBody, RetireBody, Worker

DRAIN_S = 20.0
"""Seconds that a worker told to end gives to requests in flight; one that is ended by its system has about thirty."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(host: str, port: int, key: str | None) -> socket.socket:
    """A listening socket, taken before anything expensive starts.

    Raises:
        InputError: the port is taken, or the address is not loopback and there is no key.
    """
    if host not in _LOOPBACK and not key:
        raise InputError(f"a worker on {host} needs a key: set the key variable, or listen on 127.0.0.1")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error
    listener.listen(512)
    return listener


def _refusal(scope: Scope, key: str | None) -> Response | None:
    """Before any route: the key, no browser, and a body of bounded, told length."""
    headers = dict(scope["headers"])
    if key and not hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + key.encode()):
        return error_response(401, "key", "the worker's key is missing or wrong")
    if b"origin" in headers:
        return error_response(403, "browser", "a page in a browser is no client of a worker")
    # A body of untold length is not read at all.
    length = headers.get(b"content-length", b"" if scope["method"] == "POST" else b"0")
    most = MAX_BODY if scope["path"] == "/generate" else MAX_JSON
    if not length.isdigit() or int(length) > most or b"transfer-encoding" in headers:
        return error_response(413, "too_long", f"this request may have at most {most} bytes, and must tell how many")
    return None


def worker_app(
    engine: Engine,
    host: EngineHost,
    model: Path,
    adapters_root: Path,
    key: str | None,
    vocabulary_size: int,
    *,
    max_rank: int = 512,
    log: LogTail | None = None,
) -> FastAPI:
    """The app over `engine`, which lives on `host`'s loop and is started with the app; `log` is what it tells of its own."""
    worker = Worker(engine, host, model, adapters_root, vocabulary_size, max_rank)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        start = asyncio.create_task(worker.start())
        yield
        start.cancel()

    app = FastAPI(title="entente worker", docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    app.state.worker = worker
    app.add_middleware(RequestReader, refuse=partial(_refusal, key=key))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_response(400, "malformed", f"{'.'.join(map(str, first['loc']))}: {first['msg']}")

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return error_response(error.status_code, "malformed" if error.status_code == 400 else "no_route", str(error.detail))

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = await request.body()
        answer = asyncio.ensure_future(worker.generate(body))
        gone = asyncio.ensure_future(request.receive())
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():  # the client hung up: what nobody waits for need not be drawn
            answer.cancel()
            return _failure_response(worker, Busy())
        if (error := answer.exception()) is not None:
            return _failure_response(worker, error)
        return Response(answer.result(), media_type=CONTENT_TYPE)

    @app.post("/publish")
    async def publish(body: PublishBody) -> Response:
        try:
            await worker.publish(body)
        except EntenteError as error:
            return _failure_response(worker, error, kind="adapter")
        return JSONResponse(version_fields(worker.newest))

    @app.post("/retire")
    async def retire(body: RetireBody) -> Response:
        try:
            await worker.retire(body)
        except EntenteError as error:
            return _failure_response(worker, error)
        return JSONResponse(version_fields(worker.newest))

    @app.get("/stats")
    async def stats() -> Response:
        if not worker.started:
            return _failure_response(worker, EngineLostError("the worker is still warming up"))
        return JSONResponse(asdict(await host.run(engine.stats())))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse(worker.health())

    @app.get("/metrics")
    async def metrics() -> Response:
        if not worker.started:
            return _failure_response(worker, EngineLostError("the worker is still warming up"))
        told = worker.metrics.text(await host.run(engine.stats()), int(str(worker.health()["restarts"])))
        return Response(told, media_type=METRICS_TYPE)

    @app.get("/log")
    async def lines(after: int = 0) -> Response:
        return JSONResponse({"lines": log.since(after) if log else []})

    return app


def serve(
    app: FastAPI, listener: socket.socket, *, drain_s: float = DRAIN_S, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM, Ctrl-C or the loss of the engine; requests in flight get `drain_s` seconds to end.

    Raises:
        EntenteError: the engine did not start, or was lost for good.
    """
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(drain_s)),
    )
    server = uvicorn.Server(config)
    worker: Worker = app.state.worker
    worker.on_ready = on_ready
    worker.on_failure = lambda: setattr(server, "should_exit", True)
    # uvicorn raises a signal again after it has ended by it, and what stands below us has an engine to close.
    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT) if mine}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if worker.failure is not None:
        raise worker.failure


def _failure_response(worker: Worker, error: BaseException, kind: str = "refused") -> Response:
    """The status, kind and error_response of what went wrong."""
    more: dict[str, int | str] = {}
    match error:
        case ForbiddenPath():
            status, kind = 403, "path"
        case DataError() if kind != "adapter":
            status, kind = 400, "malformed"
        case IdConflict():
            status, kind, error = 409, "another_body", EntenteError("this request id belongs to another request")
        case Busy():
            status, kind, error = 429, "busy", EntenteError("too many requests are in flight here, or this one was left alone")
        case VersionGoneError():
            status, kind, more = 410, "version_gone", version_fields(worker.newest)
        case EngineLostError():
            status, kind = 503, "engine_lost"
        case EntenteError():
            status = 409
        case _:
            raise error
    worker.metrics.refused(kind)
    return error_response(status, kind, str(error), more)
