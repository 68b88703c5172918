"""OpenAI-compatible server of legal orders: models, and chat completions whose last message is a position.

The answer is a complete legal order set of the power that the message names, one order per line, sampled from one policy version.
Log-probabilities are those of the sampled tokens, under the mask and at the request's temperature. If a client disconnects, the
server cancels its samples. On a loopback address, the server rejects requests with another Host or Origin; on other addresses,
requests without the key or with any Origin. It stores nothing.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.prompts import board_text
from entente.inference.engine import Engine
from entente.inference.host import EngineHost
from entente.inference.supervisor import EngineSupervisor
from entente.live_games.http_server import CheckedHeaders, foreign_header, has_key, headers_of, is_too_long
from entente.live_games.orders_request import ApiError, ChatRequest, read_question, read_request
from entente.players.policy import DecisionRequest, PolicyPlayer, Sampled, Tokens
from entente.telemetry.errors import EngineError, EngineLostError, EntenteError, VersionGoneError

MAX_REQUESTS = 512
"""Maximum order sets in flight: four times the default batch of an engine, to keep it busy."""
LARGEST_BODY = 2 << 20
"""Bytes; a whole game in the diplomacy package's format has a few hundred thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    name: str
    """Model name of the API: 'mine:v20' or 'models/whole-192'."""
    fingerprint: str
    """Of its weights, tokenizer and prompts: equal fingerprint, seed and position give equal orders."""
    host: EngineHost
    engine: Engine
    tokens: Tokens
    version: int


class OrderSampler:
    """The samples in flight of one served policy, on the HTTP server's event loop. `failure`: why the engine is permanently lost;
    `on_failure` is called then."""

    def __init__(self, policy: ServedPolicy, most: int = MAX_REQUESTS) -> None:
        self.policy = policy
        self.in_flight = 0
        self.failure: EngineLostError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._most = most

    async def answer(self, asked: ChatRequest, legal: LegalOrders, board: Board, name: str, receive: Receive) -> list[Sampled]:
        """One sample for each choice; empty if the client disconnects. A failed sample cancels the others. `name` is unique in
        flight.

        Raises:
            ApiError: an answer may be longer than the request allows, or too many samples are in flight.
            EntenteError: a sample failed.
        """
        policy, choices = self.policy, asked.n or 1
        for limit in ("max_tokens", "max_completion_tokens"):
            most = getattr(asked, limit)
            if most and most < (longest := await policy.host.run(_longest(policy.tokens, legal))):
                text = f"'{limit}' {most} is less than the {longest} tokens of {legal.power}'s longest order set: raise it"
                raise ApiError(400, text, code="invalid_value", param=limit)
        if self.in_flight + choices > self._most:
            text = f"{self.in_flight} order sets are in flight, and the limit is {self._most}: try again"
            raise ApiError(429, text, code="rate_limit_exceeded")
        board_prompt = board_text(board, legal.power, policy.tokens.prompts)
        request = DecisionRequest(
            game=name,
            rng_name=secrets.token_hex(8) if asked.seed is None else f"seed {asked.seed}",
            phase_index=0,
            power=legal.power,
            legal=legal,
            board=board,
            snapshot_id=hashlib.blake2b(board_prompt.encode(), digest_size=8).hexdigest(),
            temperature=asked.sampling_temperature,
        )
        samples = [asyncio.create_task(self._sample(request, number)) for number in range(choices)]
        self.in_flight += choices
        for each in samples:
            each.add_done_callback(self._end)
        whole, gone = asyncio.gather(*samples), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            return whole.result() if whole.done() else []
        finally:
            for each in (gone, *samples):
                each.cancel()
            await asyncio.gather(gone, whole, *samples, return_exceptions=True)

    def _end(self, _: object) -> None:
        self.in_flight -= 1

    async def _sample(self, request: DecisionRequest, number: int) -> Sampled:
        policy = self.policy
        work = PolicyPlayer(policy.engine, policy.tokens, policy.version).decide(request, number)
        try:
            return await policy.host.run(work)
        except EngineLostError:
            if isinstance(policy.engine, EngineSupervisor) and policy.engine.lost is not None:
                self.failure = policy.engine.lost
                self.on_failure()
            raise


async def _longest(tokens: Tokens, legal: LegalOrders) -> int:
    return tokens.tables.table(legal).longest


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def orders_app(samples: OrderSampler, key: str | None, own_names: Sequence[str]) -> FastAPI:
    """The app over one served policy. `key` None: no key. `own_names`: allowed Hosts on a loopback address, else empty."""
    policy, began = samples.policy, int(time.time())
    app = FastAPI(title="entente orders", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(CheckedHeaders, refuse=partial(_refusal, key=key, own_names=own_names))

    @app.exception_handler(EntenteError)
    async def refused(request: Request, error: EntenteError) -> Response:
        match error:
            case ApiError():
                return error.response()
            case EngineLostError() | VersionGoneError():
                return ApiError(503, str(error), code="engine_lost").response()
            case EngineError():  # the engine rejected this request, for example as too long
                return ApiError(400, str(error), code="engine_refused").response()
        return ApiError(500, str(error), code="server_error").response()

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        text = f"there is no {request.method} {request.url.path[:60]!r} here: ask for /v1/models or /v1/chat/completions"
        return ApiError(error.status_code, text, code="unknown_url").response()

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        answer = ApiError(500, "the server failed in this request; its log says why", code="server_error").response()
        answer.headers["connection"] = "close"  # uvicorn logs the error and closes the connection
        return answer

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
        sampled = await samples.answer(asked, legal, board, name, request.receive)
        head = {"id": name, "created": int(time.time()), "model": policy.name, "system_fingerprint": policy.fingerprint}
        return _answer(head, asked, sampled, policy.tokens) if sampled else Response(status_code=499)  # the client has gone

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"in_flight": samples.in_flight, "engine": asdict(await policy.host.run(policy.engine.stats()))})

    return app


def _refusal(scope: Scope, key: str | None, own_names: Sequence[str]) -> Response | None:
    headers = headers_of(scope)
    foreign = foreign_header(headers, own_names) if own_names else "origin" if b"origin" in headers else None
    refusal = None
    if foreign == "host":
        refusal = ApiError(403, f"this server is on this machine only: ask http://{own_names[0]}", code="foreign_host")
    elif foreign == "origin":
        refusal = ApiError(403, "a page in a browser may not use this server", code="foreign_origin")
    elif key and not has_key(headers, key):
        text = "the server's key is missing or wrong: send it as 'Authorization: Bearer KEY'"
        refusal = ApiError(401, text, code="invalid_api_key")
    elif is_too_long(scope, headers, LARGEST_BODY):
        text = f"a request may have at most {LARGEST_BODY} bytes, and must state its length"
        refusal = ApiError(413, text, code="request_too_large")
    return refusal and refusal.response()


# ---- the response in the API's format ----


def _answer(head: dict[str, Any], asked: ChatRequest, sampled: Sequence[Sampled], tokens: Tokens) -> Response:
    prompt, completion = len(sampled[0].prompt_ids), sum(len(each.generation.token_ids) for each in sampled)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    choices = [_choice(each, number, tokens, logprobs=bool(asked.logprobs)) for number, each in enumerate(sampled)]
    return JSONResponse({"object": "chat.completion", **head, "choices": choices, "usage": usage})


def _choice(sampled: Sampled, index: int, tokens: Tokens, *, logprobs: bool) -> dict[str, Any]:
    """One choice. A thought before the orders is `reasoning_content`, as in other servers."""
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(sampled.orders), "refusal": None}
    ids = sampled.generation.token_ids.tolist()
    if tokens.thinking is not None:
        thought, ids = tokens.thinking.split(ids)
        message["reasoning_content"] = tokens.codec.decode(thought).strip()
    content = _token_logprobs(ids, [float(each) for each in sampled.generation.logprobs[-len(ids) :]], tokens) if logprobs else []
    probabilities = {"content": content, "refusal": None} if logprobs else None
    return {"index": index, "message": message, "logprobs": probabilities, "finish_reason": "stop"}


def _token_logprobs(ids: Sequence[int], logprobs: Sequence[float], tokens: Tokens) -> list[dict[str, Any]]:
    """The end token has no bytes, because it is not part of the content."""
    entries, text = [], ""
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        # Some tokenizers decode a token differently without the tokens before it.
        longer = tokens.codec.decode(ids[:place])
        piece = longer[len(text) :] if longer.startswith(text) else tokens.codec.decode([token])
        text = longer
        spelled = [] if token == tokens.codec.eos_id else list(piece.encode())
        entries.append({"token": piece, "logprob": logprob, "bytes": spelled, "top_logprobs": []})
    return entries
