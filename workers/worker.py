"""The inference worker: one engine behind a small authenticated HTTP app.

Without a key it listens on loopback only; the key is compared in constant time. One route needs none: `GET /ready` tells only
whether the worker accepts requests. Adapters are loaded from one folder only, and checked before the engine loads them. Bodies
are bounded and checked. Requests from web pages are refused. Every request id is drawn once. vLLM's own server and its
development routes are not used.

Status codes: 200; 400 malformed; 401 key; 403 path; 408 too slow; 409 refused, with its kind; 410 version not served, with the
newest that is; 413 and 431 too long; 429 too many in flight; 503 no engine now. Each except 200 has a sentence and a kind.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from inference.engine import Engine
from inference.host import EngineHost
from telemetry.errors import DataError, EngineLostError, EntenteError, InputError, VersionGoneError
from telemetry.log_tail import LogTail
from workers.http_bounds import RequestReader, error_response
from workers.http_guards import has_key, headers_of, is_too_long
from workers.http_server import make_server, signals_end_here
from workers.wire import CONTENT_TYPE, MAX_BODY, MAX_JSON, version_fields
from workers.worker_memory import Busy, IdConflict
from workers.worker_metrics import CONTENT_TYPE as METRICS_TYPE
from workers.worker_service import ForbiddenPath, PublishBody, RetireBody, Worker

DRAIN_S = 20.0
"""Seconds for requests in flight after a termination signal; schedulers usually allow about thirty before they kill."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
READY = "/ready"
"""Route that needs no key: 200 if requests are accepted, else 503. A probe of Kubernetes cannot send a Secret."""


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


def _refusal(scope: Scope, key: str | None) -> Response | None:
    """The refusal of a request with a wrong key, from a web page, or without a bounded content length; None: accepted."""
    headers = headers_of(scope)
    probes = scope["path"] == READY and scope["method"] == "GET"
    if key and not has_key(headers, key) and not probes:
        return error_response(401, "key", "the worker's key is missing or wrong")
    if b"origin" in headers:
        return error_response(403, "browser", "a page in a browser is no client of a worker")
    most = MAX_BODY if scope["path"] == "/generate" else 0 if probes else MAX_JSON
    if is_too_long(scope, headers, most):
        return error_response(413, "too_long", f"this request may have at most {most} bytes, and must state its content-length")
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
    """The app over `engine`, which runs on `host`'s loop and starts with the app.

    Args:
        model: folder of the base model.
        adapters_root: folder that must contain every adapter.
        key: the key that clients must send; None: none.
        max_rank: highest adapter rank.
        log: the worker's log lines, served at `/log`.
    """
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
        if not answer.done():  # the client disconnected
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

    @app.get(READY)
    async def ready() -> Response:
        return JSONResponse({"ready": worker.ready}, 200 if worker.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        if not worker.started:
            return _failure_response(worker, EngineLostError("the worker is still warming up"))
        text = worker.metrics.text(await host.run(engine.stats()), int(str(worker.health()["restarts"])))
        return Response(text, media_type=METRICS_TYPE)

    @app.get("/log")
    async def lines(after: int = 0) -> Response:
        return JSONResponse({"lines": log.since(after) if log else []})

    return app


def serve(
    app: FastAPI, listener: socket.socket, *, drain_s: float = DRAIN_S, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM, Ctrl-C or the loss of the engine. Requests in flight get `drain_s` seconds to finish.

    Raises:
        EntenteError: the engine did not start, or was lost for good.
    """
    server = make_server(app, drain_s=drain_s)
    worker: Worker = app.state.worker
    worker.on_ready = on_ready
    worker.on_failure = lambda: setattr(server, "should_exit", True)
    with signals_end_here():
        server.run(sockets=[listener])
    if worker.failure is not None:
        raise worker.failure


def _failure_response(worker: Worker, error: BaseException, kind: str = "refused") -> Response:
    """The response for `error`; counts it in the metrics. `kind` applies where the error has none of its own."""
    more: dict[str, int | str] = {}
    match error:
        case ForbiddenPath():
            status, kind = 403, "path"
        case DataError() if kind != "adapter":
            status, kind = 400, "malformed"
        case IdConflict():
            status, kind, error = 409, "another_body", EntenteError("this request id belongs to another request")
        case Busy():
            status, kind, error = 429, "busy", EntenteError("too many requests are in flight here, or the client disconnected")
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
