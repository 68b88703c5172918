"""Draws each request once. A repeated request waits for the draw in flight, or gets the stored answer.

An id belongs to one body; the same id with another body is refused. A request that no client waits for is cancelled and removed.
This module runs on the HTTP server's event loop.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from records.generation import GenerationRequest

REMEMBERED = 2048
"""Answers kept, each a few hundred bytes. Retries come within seconds."""
MOST_IN_FLIGHT = 4096


class IdConflict(Exception):
    """The id belongs to another request."""


class Busy(Exception):
    """Too many requests are in flight."""


@dataclass(slots=True, eq=False)
class _Flight:
    body: bytes
    task: asyncio.Task[bytes]
    waiting: int = 0


class AnswerMemory:
    """Requests in flight and the latest answers, by request id."""

    def __init__(self, draw: Callable[[GenerationRequest], Coroutine[Any, Any, bytes]]) -> None:
        self._draw = draw
        self._flights: dict[str, _Flight] = {}
        self._answers: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._draws = itertools.count()

    @property
    def in_flight(self) -> int:
        """Requests being drawn."""
        return len(self._flights)

    async def answer(self, request: GenerationRequest, body: bytes) -> bytes:
        """The packed answer to `request`; `body` is the request's content or its hash.

        Raises:
            IdConflict: the id belongs to another request.
            Busy: too many requests are in flight.
        """
        name = request.request_id
        if name in self._answers:
            known, answer = self._answers[name]
            if known != body:
                raise IdConflict(name)
            return answer
        flight = self._flights.get(name)
        if flight is None:
            if len(self._flights) >= MOST_IN_FLIGHT:
                raise Busy
            # Each draw has its own id in the engine, because a cancelled draw of this request may still be there.
            drawn = replace(request, request_id=f"{name}#{next(self._draws)}")
            flight = _Flight(body, asyncio.get_running_loop().create_task(self._draw(drawn)))
            self._flights[name] = flight
            flight.task.add_done_callback(lambda task: self._finish(name, flight, task))
        elif flight.body != body:
            raise IdConflict(name)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                self._forget(name, flight)

    def _finish(self, name: str, flight: _Flight, task: asyncio.Task[bytes]) -> None:
        self._forget(name, flight)
        if not task.cancelled() and task.exception() is None:
            self._answers[name] = (flight.body, task.result())
            if len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)

    def _forget(self, name: str, flight: _Flight) -> None:
        if self._flights.get(name) is flight:
            del self._flights[name]
