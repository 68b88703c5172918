"""Serves legal orders to any client of the OpenAI API: models, and chat completions whose last message is a position.

The answer is a complete legal order set of the power that the message names, drawn by one policy version. On a loopback address,
requests that name another host or come from another page are refused; on any other address, those without the key, and those of
any page. Bodies are bounded. Nothing is stored. Errors have the API's form (`play/api_errors.py`).
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from play.api_answer import Heading
from play.api_draws import Draws, Reply
from play.api_errors import ApiError, as_api_error, refusal
from play.api_request import read_question, read_request
from telemetry.errors import EntenteError
from workers.http_bounds import RequestReader
from workers.http_guards import foreign_header, has_key, headers_of, is_too_long

LARGEST_BODY = 2 << 20
"""Bytes; a whole game as the diplomacy package saves it has some hundred thousand."""


def orders_app(draws: Draws, key: str | None, own_names: Sequence[str]) -> FastAPI:
    """The app over one served policy.

    Args:
        key: the key that clients must send; None: none.
        own_names: host and port under which clients may name a server on a loopback address; empty: any, on other addresses.
    """
    policy, began = draws.policy, int(time.time())
    app = FastAPI(title="entente orders", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestReader, refuse=partial(_refusal, key=key, own_names=own_names), say=refusal)

    @app.exception_handler(EntenteError)
    async def refused(request: Request, error: EntenteError) -> Response:
        return as_api_error(error).response()

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        text = f"there is no {request.method} {request.url.path[:60]!r} here: ask for /v1/models or /v1/chat/completions"
        return ApiError(error.status_code, text, code="unknown_url").response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        # uvicorn logs the error and closes the connection.
        return ApiError(500, "the server failed in this request; its log says why", code="server_error").response(close=True)

    def model(name: str) -> dict[str, Any]:
        if name != policy.name:
            text = f"there is no model {name[:100]!r} here: this server has {policy.name!r}"
            raise ApiError(404, text, code="model_not_found", param="model")
        return {"id": name, "object": "model", "created": began, "owned_by": "entente"}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model(policy.name)]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return JSONResponse(model(name))

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        asked = read_request(await request.body())
        model(asked.model)
        board, legal = read_question(asked)
        name = f"chatcmpl-{secrets.token_hex(12)}"
        begun = await draws.begin(asked, board, legal, name)
        heading = Heading(id=name, created=int(time.time()), model=policy.name, fingerprint=policy.fingerprint)
        return Reply(asked, heading, policy.tokens, begun)

    @app.get("/health")
    async def health() -> Response:
        """For operators: draws in flight, and the engine's counts."""
        return JSONResponse({"in_flight": draws.in_flight, "engine": asdict(await policy.host.run(policy.engine.stats()))})

    return app


def _refusal(scope: Scope, key: str | None, own_names: Sequence[str]) -> Response | None:
    """The refusal of a request for another host, from a page, without the key, or with a large body; None: accepted."""
    headers = headers_of(scope)
    if own_names:
        match foreign_header(headers, own_names):
            case "host":
                return refusal(403, "foreign_host", f"this server is on this machine only: ask http://{own_names[0]}")
            case "origin":
                return refusal(403, "foreign_origin", "another page asks in its place: a page may not use this server")
    elif b"origin" in headers:
        return refusal(403, "foreign_origin", "a page in a browser may not use this server")
    if key and not has_key(headers, key):
        return refusal(401, "key", "the server's key is missing or wrong: send it as 'Authorization: Bearer KEY'")
    if is_too_long(scope, headers, LARGEST_BODY):
        return refusal(413, "too_long", f"a request may have at most {LARGEST_BODY} bytes, and must state its length")
    return None
