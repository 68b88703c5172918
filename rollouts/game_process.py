"""Main module of a game process: plays start groups and has their decisions drawn by the flow's engine.

python -m rollouts.game_process FD MODEL PROMPTS

FD is an inherited socket, MODEL the folder of the model, for its tokenizer, and PROMPTS the prompt settings as JSON.
The process holds games, prompts and legal tables, and neither a model nor an engine. It imports neither torch, vLLM nor Prefect,
and writes no files. `rollouts/game_pool.py` starts it.
"""

import asyncio
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from decoding.codec import Codec
from game.prompt_settings import PromptSettings
from records.generation import Generation, GenerationRequest
from rollouts.deciders import PolicyDecider, Tokens
from rollouts.game_messages import (
    Answer,
    Asked,
    Frames,
    GamesEnded,
    GamesReady,
    GamesToPlay,
    GroupEnded,
    Requests,
    SentTables,
    StopGames,
    error_fields,
    error_of,
)
from rollouts.roll_out import roll_out
from telemetry.errors import EntenteError
from telemetry.memory import freeze_old_objects
from telemetry.parent import end_with_parent
from telemetry.sampling import sampled

_BATCH = 16
"""Requests that are sent together while more games could play. The first of many then do not wait for the last, and the engine
does not begin with a batch of one."""


class DistantEngine:
    """Has the flow's engine draw the decisions of one job and one seat."""

    def __init__(self, games: "Games", job: int, seat: str) -> None:
        self._games, self._job, self._seat = games, job, seat

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`."""
        return await self._games.ask(self._job, self._seat, request)


class Games:
    """The jobs of this process."""

    def __init__(self, tokens: Tokens, send: Callable[[Any], None], end: Callable[[], None]) -> None:
        """`end` ends the process after the messages sent so far."""
        self._tokens, self._send, self._end = tokens, send, end
        self._tables = SentTables()
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[tuple[int, str, str], asyncio.Future[Generation]] = {}
        """Futures of requests, by job, seat and request id."""
        self._unsent: list[Asked] = []

    def receive(self, message: Any) -> None:
        """Handle a message of the flow."""
        match message:
            case Answer():
                answer = self._waiting.get((message.job, message.seat, message.request_id))
                if answer is None or answer.done():
                    return
                if message.generation is None:
                    answer.set_exception(error_of(message.error))
                else:
                    answer.set_result(message.generation)
            case GamesToPlay():
                self._jobs[message.job] = asyncio.get_running_loop().create_task(self._play(message))
            case StopGames():
                if (job := self._jobs.pop(message.job, None)) is not None:
                    job.cancel()
            case _:
                raise TypeError(f"a game process cannot handle {type(message).__name__}")

    async def ask(self, job: int, seat: str, request: GenerationRequest) -> Generation:
        """Have a request drawn."""
        key = job, seat, request.request_id
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        slot, table = self._tables.place(request.table)
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_requests)
        self._unsent.append(
            Asked(
                job=job,
                seat=seat,
                request_id=request.request_id,
                prompt_ids=request.prompt_ids,
                slot=slot,
                table=table,
                draw_seed=request.seed,
                temperature=request.temperature,
                snapshot_id=request.snapshot_id,
                version=request.version,
            )
        )
        if len(self._unsent) >= _BATCH:
            self._send_requests()
        try:
            return await answer
        finally:
            del self._waiting[key]

    def _send_requests(self) -> None:
        if self._unsent:
            self._send(Requests(self._unsent))
            self._unsent = []

    async def _play(self, job: GamesToPlay) -> None:
        number, tokens = job.job, self._tokens
        try:
            played = await roll_out(
                job.groups,
                DistantEngine(self, number, ""),
                tokens,
                job.settings,
                producer=job.producer,
                seed=job.seed,
                on_group=lambda group: self._send(GroupEnded(job=number, group=group)),
                deciders={
                    seat: PolicyDecider(DistantEngine(self, number, seat), tokens, version)
                    for seat, version in job.versions.items()
                },
            )
        except Exception as error:
            self._send(GamesEnded(job=number, played=None, error=error_fields(error)))
            if not isinstance(error, EntenteError):  # forks of the job may still play, so begin anew
                traceback.print_exc()
                self._end()
        else:
            self._send(GamesEnded(job=number, played=played))
        finally:
            self._jobs.pop(number, None)


async def serve(connection: socket.socket, tokens: Tokens) -> None:
    """Play for the flow at the other end of `connection` until it is closed."""

    def receive(message: Any) -> None:
        games.receive(message)

    _, frames = await asyncio.get_running_loop().create_unix_connection(partial(Frames, receive), sock=connection)
    games = Games(tokens, frames.send, frames.close)
    frames.send(GamesReady())
    await frames.ended


def main(descriptor: int, model: Path, prompts: PromptSettings) -> None:
    """Serve until the flow closes its end of the socket, or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the flow closes the socket
    end_with_parent()
    tokens = Tokens(Codec(model), prompts)
    with freeze_old_objects():
        asyncio.run(serve(socket.socket(fileno=descriptor), tokens))


if __name__ == "__main__":
    with sampled("games"):
        main(int(sys.argv[1]), Path(sys.argv[2]), PromptSettings.model_validate_json(sys.argv[3]))
