"""The inference worker: one engine behind a small authenticated HTTP app.

Loopback unless a key is set; the key is compared in constant time; adapters load from under one folder only; bodies
are bounded and
checked before they reach the engine. vLLM's own server and its development routes are not part of it.
"""

import hmac
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from decoding.model_files import model_fingerprint
from inference.engine import Engine
from inference.host import EngineHost
from inference.wire import CONTENT_TYPE, MAX_BODY, pack_generation, unpack_request
from telemetry.errors import DataError, EntenteError, InputError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class PublishBody(BaseModel):
    """What `publish` is told."""

    model_config = ConfigDict(extra="forbid")

    version: int
    adapter: str
    adapter_hash: str


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


def worker_app(
    engine: Engine, host: EngineHost, model: Path, adapters_root: Path, key: str | None, vocabulary_size: int
) -> FastAPI:
    """The app over a started `engine` that lives on `host`'s loop."""
    app = FastAPI(title="entente worker", docs_url=None, redoc_url=None, openapi_url=None)
    root = adapters_root.resolve()
    fingerprint = model_fingerprint(model)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(given.encode(), key.encode()):
            return _sentence(401, "the worker's key is missing or wrong")
        # A body of untold length is not read at all.
        length = request.headers.get("content-length", "" if request.method == "POST" else "0")
        if not length.isdigit() or int(length) > MAX_BODY:
            return _sentence(413, f"a request may have at most {MAX_BODY} bytes")
        return await call_next(request)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        try:
            wanted = unpack_request(await request.body(), vocabulary_size)
            answer = await host.run(engine.generate(wanted))
        except EntenteError as error:
            return _sentence(400 if isinstance(error, DataError) else 409, str(error))
        return Response(pack_generation(answer), media_type=CONTENT_TYPE)

    @app.post("/publish")
    async def publish(body: PublishBody) -> Response:
        adapter = (root / body.adapter).resolve()
        if not adapter.is_relative_to(root) or not adapter.is_dir():
            return _sentence(403, f"adapter '{body.adapter}' is no folder under this worker's root")
        try:
            await host.run(engine.publish(body.version, adapter, body.adapter_hash))
        except EntenteError as error:
            return _sentence(409, str(error))
        return JSONResponse({"policy_version": body.version})

    @app.get("/stats")
    async def stats() -> Response:
        return JSONResponse(asdict(await host.run(engine.stats())))

    @app.get("/health")
    async def health() -> Response:
        counts = await host.run(engine.stats())
        return JSONResponse(
            {
                "ready": True,
                "model": fingerprint,
                "policy_version": counts.policy_version,
                "worker": engine.name,
            }
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return app


def serve(app: FastAPI, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT."""
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def _sentence(status: int, text: str) -> Response:
    return JSONResponse({"sentence": text}, status_code=status)
