"""Who decides for a seat that no script plays: one question, one legal set of orders.

Owns the way from a board to a drawn decision (prompt, legal table, request, orders), whoever asks: the policy being trained, a
version frozen as an opponent, a version that is measured. Never keeps what was drawn; whoever wants it for a row keeps it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from game.board import Board
from game.legal import LegalOrders
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.prompts import board_text, power_text, rules_text
from inference.engine import Engine
from records.generation import Generation, GenerationRequest
from rollouts.seeds import seed_of
from telemetry.errors import VersionGoneError

_VERSIONS_MISSED = 3
"""Versions that may be retired under one request before its fork gives up."""


class Tokens:
    """What turns a decision into tokens and back, for one model: how prompts are written, their ids, the legal tables."""

    def __init__(self, codec: Codec, prompts: PromptSettings = DEFAULT_PROMPTS) -> None:
        self.codec, self.prompts = codec, prompts
        self.tables = TableBuilder(codec, prompts.order_notation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One decision that is asked for."""

    game: str
    """Name of the fork or game, unique among those that an engine plays at a time; request ids derive from it."""
    dice: str
    """Name that draws derive from: equal for players that are to meet the same luck."""
    ply: int
    power: str
    legal: LegalOrders
    board: Board
    """The position, only looked at."""
    snapshot_id: str
    """Where the game began."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One decision as it was drawn."""

    seed: int
    prompt_ids: list[int]
    generation: Generation
    orders: list[str]
    legal_ids: np.ndarray
    """int32: legal sets of the completion's positions, one after another."""
    legal_offsets: np.ndarray
    """int32 [completion tokens + 1]: position i allows legal_ids[legal_offsets[i]:legal_offsets[i + 1]]."""


class Decider(Protocol):
    """Anything that orders for a power and may take its time."""

    async def decide(self, question: Question) -> Sequence[str]:
        """One legal set of orders in canonical form.

        Raises:
            EngineError, DataError: it cannot be had.
        """
        ...


class PolicyDecider:
    """A policy version as a player: one draw, nothing kept."""

    def __init__(self, engine: Engine, tokens: Tokens, version: int | None) -> None:
        """`version`: the engine's number of it; None: whatever is newest there."""
        self._engine, self._tokens, self._version = engine, tokens, version

    async def decide(self, question: Question) -> list[str]:
        """See `Decider`."""
        return (await draw(question, self._engine, self._tokens, version=self._version)).orders


def position_texts(board: Board, tokens: Tokens) -> tuple[str, str]:
    """The parts of a prompt that all powers of a position share: rules and board."""
    return rules_text(tokens.prompts), board_text(board)


async def draw(
    question: Question,
    engine: Engine,
    tokens: Tokens,
    *,
    version: int | None = None,
    texts: tuple[str, str] | None = None,
    repetition: int = 0,
) -> Answer:
    """Draw one decision.

    Args:
        version: the engine's number of the policy version; None: the newest.
        texts: `position_texts` of the board, where several powers share them.
        repetition: which of several draws for one question; each has dice of its own.
    """
    choice, again = question.legal, (repetition,) if repetition else ()
    table = tokens.tables.table(choice)
    shared = texts or position_texts(question.board, tokens)
    prompt_ids = tokens.codec.encode_prompt((*shared, power_text(choice, question.board, tokens.prompts)))
    seed = seed_of(question.dice, question.ply, question.power, *again)
    request = GenerationRequest(
        request_id="/".join(str(part) for part in (question.game, question.ply, question.power, *again)),
        prompt_ids=prompt_ids,
        table=table,
        seed=seed,
        temperature=question.temperature,
        snapshot_id=question.snapshot_id,
        version=version,
    )
    generation = await (_drawn_by_the_newest(engine, request) if version is None else engine.generate(request))
    completion = generation.token_ids.tolist()
    legal_ids, legal_offsets = table.legal_sets(completion)
    return Answer(
        seed=seed,
        prompt_ids=prompt_ids,
        generation=generation,
        orders=tokens.tables.read(completion, choice),
        legal_ids=legal_ids,
        legal_offsets=legal_offsets,
    )


async def _drawn_by_the_newest(engine: Engine, request: GenerationRequest) -> Generation:
    """Draw under the newest version; again where that was retired while the request waited."""
    for _ in range(_VERSIONS_MISSED):
        try:
            return await engine.generate(request)
        except VersionGoneError:
            continue
    return await engine.generate(request)
