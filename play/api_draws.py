"""Draws of one served policy for the orders API, and the replies that send them.

Each choice of a request is drawn once. A client that disconnects cancels its draws; a draw that fails cancels those beside it.
A stream begins when the first order set is drawn, because engines return whole completions; its events are whole orders.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from game.board import Board
from game.legal import LegalOrders
from game.prompts import board_text
from inference.engine import Engine
from inference.host import EngineHost
from play.api_answer import DONE, Heading, choice_of, chunks_of, event, usage_of
from play.api_errors import ApiError, as_api_error
from play.api_request import ChatRequest
from rollouts.deciders import DecisionRequest, DrawnDecision, Tokens, draw
from telemetry.errors import EngineLostError, EntenteError
from workers.supervisor import EngineSupervisor

MOST_DRAWS = 512
"""Order sets drawn at the same time: four times what an engine decodes together by default, so that it has always work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A policy version, or a model, and the engine that serves it."""

    name: str
    """What clients call the model: 'mine:v20' or 'models/dumbbot-192'."""
    fingerprint: str
    """Of its weights."""
    host: EngineHost
    engine: Engine
    tokens: Tokens
    version: int
    """Its number in the engine."""


class Draws:
    """The draws in flight of one served policy. It runs on the HTTP server's event loop."""

    def __init__(self, policy: ServedPolicy, most: int = MOST_DRAWS) -> None:
        self.policy = policy
        self.in_flight = 0
        self.failure: EngineLostError | None = None
        """Why the engine is lost for good."""
        self.on_failure: Callable[[], None] = lambda: None
        self._most = most

    async def begin(self, asked: ChatRequest, board: Board, legal: LegalOrders, name: str) -> "list[asyncio.Task[DrawnDecision]]":
        """Begin the draws of a request, one for each choice; the caller awaits or cancels them.

        Args:
            name: of the request, unique among those in flight.

        Raises:
            ApiError: an answer may be longer than the request allows, or too many draws are in flight.
        """
        for limit, most in asked.token_limits.items():
            longest = await self.policy.host.run(_longest(self.policy.tokens, legal))
            if most < longest:
                text = f"'{limit}' {most} is less than the {longest} tokens of {legal.power}'s longest order set: raise it"
                raise ApiError(400, text, code="invalid_value", param=limit)
        if self.in_flight + asked.choices > self._most:
            text = f"{self.in_flight} order sets are being drawn, and at most {self._most} may be: try again"
            raise ApiError(429, text, code="rate_limit_exceeded")
        shown = board_text(board, legal.power, self.policy.tokens.prompts)
        request = DecisionRequest(
            game=name,
            dice=secrets.token_hex(8) if asked.seed is None else f"seed {asked.seed}",
            ply=0,
            power=legal.power,
            legal=legal,
            board=board,
            snapshot_id=hashlib.blake2b(shown.encode(), digest_size=8).hexdigest(),
            temperature=asked.drawn_at,
        )
        draws = [asyncio.create_task(self._draw(request, shown, number)) for number in range(asked.choices)]
        self.in_flight += len(draws)
        for each in draws:
            each.add_done_callback(self._end)
        return draws

    def _end(self, _: object) -> None:
        self.in_flight -= 1

    async def _draw(self, request: DecisionRequest, shown: str, number: int) -> DrawnDecision:
        policy = self.policy
        work = draw(request, policy.engine, policy.tokens, version=policy.version, shown=shown, repetition=number)
        try:
            return await policy.host.run(work)
        except EngineLostError:
            if isinstance(policy.engine, EngineSupervisor) and policy.engine.lost is not None:
                self.failure = policy.engine.lost
                self.on_failure()
            raise


async def _longest(tokens: Tokens, legal: LegalOrders) -> int:
    return tokens.tables.table(legal).longest


class Reply(Response):
    """The answer to a request whose draws have begun: one object, or a stream."""

    def __init__(
        self, asked: ChatRequest, heading: Heading, tokens: Tokens, draws: "Sequence[asyncio.Task[DrawnDecision]]"
    ) -> None:
        super().__init__()
        self._asked, self._heading, self._tokens, self._draws = asked, heading, tokens, draws

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it, unless the client disconnects."""
        work = asyncio.ensure_future(self._stream(send) if self._asked.stream else self._send_whole(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for each in (work, gone, *self._draws):
                each.cancel()
            await asyncio.gather(work, gone, *self._draws, return_exceptions=True)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        drawn = await asyncio.gather(*self._draws)
        wants = bool(self._asked.logprobs)
        choices = [choice_of(each, number, self._tokens, logprobs=wants) for number, each in enumerate(drawn)]
        await JSONResponse(self._heading.whole(choices, usage_of(drawn)))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        options, number_of = self._asked.stream_options, {draw: number for number, draw in enumerate(self._draws)}
        tells_usage, waiting = options is not None and options.include_usage, set(self._draws)
        has_begun = False
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for each in sorted(done, key=number_of.__getitem__):
                    events = chunks_of(
                        self._heading,
                        each.result(),
                        number_of[each],
                        self._tokens,
                        logprobs=bool(self._asked.logprobs),
                        **({"usage": None} if tells_usage else {}),
                    )
                    if not has_begun:
                        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        has_begun = True
                    for one in events:
                        await send({"type": "http.response.body", "body": one, "more_body": True})
            usage = [self._heading.chunk([], usage=usage_of([each.result() for each in self._draws]))] if tells_usage else []
            await send({"type": "http.response.body", "body": b"".join([*usage, DONE]), "more_body": False})
        except EntenteError as error:
            if not has_begun:
                raise
            await send({"type": "http.response.body", "body": event(as_api_error(error).body), "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
