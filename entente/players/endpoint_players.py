"""Endpoints as players: each decision comes from the file of answers, or else from the endpoint.

Players return legal and complete order sets only. They count decisions without a usable answer and play default orders for them.
The file has one JSON line per answer; an incomplete line, as after a kill, is ignored and asked for again. A lost endpoint raises
an EngineError, which ends the match or the fork; a refused key and a spent budget raise an InputError, which ends the match or
the run. Answers are kept.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.prompts import PromptSettings, board_text, power_text
from entente.players.endpoint import EndpointSettings, read_endpoint
from entente.players.endpoint_client import EndpointClient
from entente.players.policy import DecisionRequest
from entente.players.read_answer import AnswerCounts, no_answer, read_answer
from entente.telemetry.errors import InputError
from storage.files import make_directory

AT_ONCE = 8
"""Requests in flight, to all endpoints together: a usual rate limit of a hosted endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    key: str
    player: str
    phase: str
    power: str
    text: str
    """The model's output; empty if there was no answer."""
    cut_off: bool = False
    failed: str
    tokens: int


_ANSWER = TypeAdapter(StoredAnswer)


def answer_key(player: str, rng_name: str, messages: Sequence[Any], answer_tokens: int) -> str:
    """Hash of endpoint, seed name, messages and token limit: equal questions of one game, or of a start group's forks, share one
    answer. Under a higher limit an answer that was cut off is asked for again."""
    return hashlib.sha256(json.dumps([player, rng_name, messages, answer_tokens]).encode()).hexdigest()[:32]


class AnswerFile:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._answers: dict[str, StoredAnswer] | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        self._read()
        return self._tokens

    def get(self, key: str) -> StoredAnswer | None:
        return self._read().get(key)

    def add(self, answer: StoredAnswer) -> None:
        """Append an answer on a new line, even if the last line of the file is incomplete."""
        answers = self._read()
        make_directory(self._file.parent)
        with open(self._file, "ab") as file:
            # Plain ASCII: no terminal control characters from a model's text.
            file.write((b"\n" if file.tell() else b"") + json.dumps(asdict(answer)).encode())
        answers[answer.key] = answer
        self._tokens += answer.tokens

    def _read(self) -> dict[str, StoredAnswer]:
        if self._answers is None:
            self._answers = {}
            for line in self._file.read_bytes().splitlines() if self._file.is_file() else ():
                try:
                    answer = _ANSWER.validate_json(line)
                except ValidationError:
                    continue
                self._answers[answer.key] = answer
            self._tokens = sum(answer.tokens for answer in self._answers.values())
        return self._answers


class OutsideDecider:
    def __init__(self, name: str, players: "EndpointPlayers") -> None:
        self.name, self._players = name, players
        self._counts: dict[str, AnswerCounts] = {}

    async def decide(self, request: DecisionRequest) -> list[str]:
        """The endpoint's orders, completed by default orders. Raises EngineError if it is lost, InputError if it refuses
        the key or the budget is spent."""
        answer = await self._players.answer(self.name, request)
        orders, counts = (
            no_answer(request.legal) if answer.failed else read_answer(answer.text, request.legal, cut_off=answer.cut_off)
        )
        self._counts[request.game] = self._counts.get(request.game, AnswerCounts()) + counts
        return orders

    def take(self, game: str) -> AnswerCounts:
        return self._counts.pop(game, AnswerCounts())

    def take_all(self) -> AnswerCounts:
        counts, self._counts = self._counts, {}
        return sum(counts.values(), AnswerCounts())


class EndpointPlayers:
    """The endpoints of one match or run, and their answers. Call the deciders on one event loop."""

    def __init__(self, names: Iterable[str], file: Path, settings: EndpointSettings) -> None:
        self._settings = settings
        self._file = AnswerFile(file)
        self._clients = {name: EndpointClient(read_endpoint(name), settings) for name in names}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._asked: dict[str, asyncio.Task[StoredAnswer]] = {}
        self.deciders: Mapping[str, OutsideDecider] = {name: OutsideDecider(name, self) for name in self._clients}

    async def answer(self, name: str, request: DecisionRequest) -> StoredAnswer:
        """The stored answer, or else the endpoint's, which it stores. Equal questions in flight share one request."""
        asked = messages(request.board, request.legal)
        key = answer_key(name, request.shared or request.rng_name, asked, self._settings.answer_tokens)
        if (stored := self._file.get(key)) is not None:
            return stored
        if key not in self._asked:
            task = asyncio.create_task(self._ask(name, key, asked, request.legal, request.board.phase))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(self._asked[key])

    async def take_all(self) -> AnswerCounts:
        return sum((decider.take_all() for decider in self.deciders.values()), AnswerCounts())

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    async def _ask(self, name: str, key: str, asked: list[dict[str, str]], legal: LegalOrders, phase: str) -> StoredAnswer:
        async with self._slots:
            spent, budget = self._file.tokens, self._settings.token_budget
            if budget and spent >= budget:
                raise InputError(
                    f"the endpoints have used {spent} tokens of endpoint.token_budget {budget}: run the command again with a "
                    "larger budget; games that ended and all answers are kept"
                )
            reply = await self._clients[name].ask(asked)
        answer = StoredAnswer(
            key=key,
            player=name,
            phase=phase,
            power=legal.power,
            text=reply.text,
            cut_off=reply.cut_off,
            failed=reply.failed,
            tokens=reply.tokens,
        )
        self._file.add(answer)
        return answer

    def _forget(self, key: str, done: "asyncio.Task[StoredAnswer]") -> None:
        del self._asked[key]
        if not done.cancelled():
            done.exception()  # the callers that waited have raised it


_PROMPTS = PromptSettings(own_line="in_place", legal_orders="lines")
_RULES = """\
You play one power in a game of Diplomacy without press, by the standard rules. 18 supply centres win: own as many as you can.

The position names each power with its units | its supply centres, and FREE supply centres. A is an army, F a fleet.
A PAR - BUR          moves
A PAR - LON VIA      moves by convoy
A PAR H              holds
A MAR S A PAR - BUR  supports a move
A MAR S A PAR        supports a unit that does not move
F ENG C A PAR - LON  convoys
A PAR R GAS          retreats
A PAR D              disbands
A PAR B              builds
WAIVE                declines a build

Below the position are your power, the kind of orders with the number of builds or disbands, your units or sites, and all your \
legal orders. Choose one legal order for each unit; for builds and disbands choose as many as the number says. Answer with these \
orders alone, one per line, each copied from the list."""


def messages(board: Board, legal: LegalOrders) -> list[dict[str, str]]:
    asked = board_text(board, legal.power, _PROMPTS) + power_text(legal, board, _PROMPTS)
    return [{"role": "system", "content": _RULES}, {"role": "user", "content": asked}]
