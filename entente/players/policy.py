"""A policy version as a player, and the interface of all players.

`PolicyPlayer.decide` does all steps from a board to orders: prompt, legal table, generation request, orders. The trained policy,
past versions as opponents and evaluated versions all use it. It stores nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from entente.decoding.codec import Codec
from entente.decoding.prompt_form import PromptForm
from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import thinking_of, thought_length
from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.prompts import ANSWER_CUE, DEFAULT_PROMPTS, PromptSettings, board_text, power_text
from entente.inference.engine import Engine
from entente.players.seeds import seed_of
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import InputError, VersionGoneError

_RETIRED_VERSIONS_MAX = 3
"""Times that a version may be retired while one request waits before the fork fails."""


class Tokens:
    def __init__(self, codec: Codec, prompts: PromptSettings = DEFAULT_PROMPTS) -> None:
        self.codec, self.prompts = codec, prompts
        self.thinking = thinking_of(codec, prompts.thinking_tokens)
        self.form = PromptForm(codec, prompts, ANSWER_CUE if self.thinking is None else self.thinking.cue)
        self.tables = TableBuilder(codec, thinking=self.thinking)
        self._text: tuple[tuple[Board, str, str], str] | None = None

    def prompt_ids(self, board: Board, legal: LegalOrders) -> list[int]:
        return self.form.ids(self._board_text(board, legal.power), power_text(legal, board, self.prompts, cue=""))

    def _board_text(self, board: Board, power: str) -> str:
        """`board_text` for this power, with a cache of one entry because the powers of a phase decide together."""
        viewer = "" if self.prompts.own_line == "in_place" else power
        key = board, board.phase, viewer
        last = self._text
        if last is None or last[0] != key:
            last = self._text = key, board_text(board, viewer, self.prompts)
        return last[1]

    def check_thought(self, longest: int) -> None:
        """Raise an InputError if a game's first prompt, the longest thought and the orders exceed `longest` tokens."""
        if self.thinking is None:
            return
        board = Board.start()
        legal = board.legal_orders()["FRANCE"]
        needed = len(self.prompt_ids(board, legal)) + self.tables.table(legal).longest
        if needed > longest:
            raise InputError(
                f"with prompts.thinking_tokens {self.prompts.thinking_tokens} the first prompt of a game and its completion need "
                f"{needed} tokens, more than inference.max_model_length {longest}: lower the one or raise the other"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRequest:
    game: str
    """Name of the fork or game, unique among those in progress on an engine. Request ids contain it."""
    rng_name: str
    """Name that seeds the sample. Equal names give equal random numbers."""
    phase_index: int
    power: str
    legal: LegalOrders
    board: Board
    """The position. A decider does not change it."""
    snapshot_id: str
    """Snapshot from which the game started."""
    temperature: float = 1.0
    shared: str = ""
    """Name of the start group, which seeds what its forks share; empty: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    orders: list[str]
    seed: int
    prompt_ids: list[int]
    generation: Generation
    legal_ids: np.ndarray
    """int32, the legal sets of all positions; see `LegalTable.legal_sets`."""
    legal_offsets: np.ndarray
    """int32 [completion tokens + 1]."""

    @property
    def probability(self) -> float:
        """Probability of the orders given the thought, if any, after the legal mask and temperature."""
        thought = thought_length(self.legal_ids, self.legal_offsets)
        return math.exp(float(np.sum(self.generation.logprobs[thought:])))


class Decider(Protocol):
    async def decide(self, request: DecisionRequest) -> Sequence[str] | Sampled:
        """One legal set of orders in canonical form; raises an EngineError or DataError if the decision failed."""
        ...


def orders_of(decided: Sequence[str] | Sampled) -> Sequence[str]:
    return decided.orders if isinstance(decided, Sampled) else decided


class PolicyPlayer:
    def __init__(self, engine: Engine, tokens: Tokens, version: int | None = None) -> None:
        """`version` None: the engine's newest."""
        self.engine, self.tokens, self.version = engine, tokens, version

    async def decide(self, request: DecisionRequest, repetition: int = 0) -> Sampled:
        """Sample one order set; `repetition`, from 0, numbers and seeds the sample. Raises EngineError or DataError."""
        legal, suffix = request.legal, (repetition,) if repetition else ()
        table = self.tokens.tables.table(legal)
        prompt_ids = self.tokens.prompt_ids(request.board, legal)
        seed = seed_of(request.rng_name, request.phase_index, request.power, *suffix)
        generation = await self._generate(
            GenerationRequest(
                request_id="/".join(str(part) for part in (request.game, request.phase_index, request.power, *suffix)),
                prompt_ids=prompt_ids,
                table=table,
                seed=seed,
                temperature=request.temperature,
                snapshot_id=request.snapshot_id,
                version=self.version,
            )
        )
        completion = generation.token_ids.tolist()
        legal_ids, legal_offsets = table.legal_sets(completion)
        return Sampled(
            orders=self.tokens.tables.read(completion, legal),
            seed=seed,
            prompt_ids=prompt_ids,
            generation=generation,
            legal_ids=legal_ids,
            legal_offsets=legal_offsets,
        )

    async def _generate(self, request: GenerationRequest) -> Generation:
        """Retries with the newest version if it was retired while the request waited."""
        for _ in range(0 if request.version is not None else _RETIRED_VERSIONS_MAX):
            try:
                return await self.engine.generate(request)
            except VersionGoneError:
                continue
        return await self.engine.generate(request)
