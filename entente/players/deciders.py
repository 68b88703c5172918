"""Deciders choose the orders of one power. This module also draws one decision from a policy version.

`draw` does all steps from a board to orders: prompt, legal table, generation request, orders. The trained policy, past
versions as opponents and evaluated versions all use it. It stores nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from entente.decoding.codec import Codec
from entente.decoding.prompt_form import PromptForm
from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import thinking_of
from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.prompts import ANSWER_CUE, DEFAULT_PROMPTS, PromptSettings, board_text, power_text
from entente.players.seeds import seed_of
from entente.records.generation import Generation, GenerationRequest
from entente.records.rows import Decision
from entente.telemetry.errors import InputError, VersionGoneError

_RETIRED_VERSIONS_MAX = 3
"""Versions that may be retired while one request waits. After one more, the fork fails."""


class Tokens:
    """Converts decisions to tokens and back for one model: prompt form, codec and legal tables."""

    def __init__(self, codec: Codec, prompts: PromptSettings = DEFAULT_PROMPTS) -> None:
        """Try the prompt form on real prompts.

        Raises:
            InputError: the model's chat template or tokenizer cannot be used; see `PromptForm`.
        """
        self.codec, self.prompts = codec, prompts
        self.thinking = thinking_of(codec, prompts.thinking_tokens)
        """How completions begin with a thought; None: they are orders alone."""
        self.form = PromptForm(codec, prompts, ANSWER_CUE if self.thinking is None else self.thinking.cue)
        self.tables = TableBuilder(codec, thinking=self.thinking)

    def prompt_ids(self, board: Board, legal: LegalOrders, shown: str | None = None) -> list[int]:
        """Ids of the prompt that asks one power for its orders.

        Args:
            shown: `board_text` of the board for this power, if the caller has computed it.
        """
        return self.form.ids(
            shown or board_text(board, legal.power, self.prompts), power_text(legal, board, self.prompts, cue="")
        )

    def shared_board(self, board: Board) -> str | None:
        """`board_text` of the board, if it is the same for all powers; else None."""
        return board_text(board, "", self.prompts) if self.prompts.own_line == "in_place" else None

    def check_thought(self, longest: int) -> None:
        """Check that a thought leaves room for a prompt and its orders.

        Raises:
            InputError: the first prompt of a game needs more than `longest` tokens with the longest thought and the orders.
        """
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
    """A request for one decision."""

    game: str
    """Name of the fork or game, unique among those in progress on an engine. Request ids contain it."""
    dice: str
    """Name from which the draw's seed derives. Equal names give equal random numbers."""
    ply: int
    power: str
    legal: LegalOrders
    board: Board
    """The position. A decider does not change it."""
    snapshot_id: str
    """Snapshot from which the game started."""
    temperature: float = 1.0
    shared: str = ""
    """Name of the start group, from which luck derives that its forks share; empty: there is none."""


class CompletionSource(Protocol):
    """The part of an `Engine` that games use."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine.generate`."""
        ...


class Decider(Protocol):
    """Chooses the orders of a power asynchronously."""

    async def decide(self, request: DecisionRequest) -> Sequence[str]:
        """One legal set of orders in canonical form.

        Raises:
            EngineError, DataError: the decision failed.
        """
        ...


class PolicyDecider:
    """Draws the orders from a policy version."""

    def __init__(self, engine: CompletionSource, tokens: Tokens, version: int | None) -> None:
        """`version`: the policy version; None: the engine's newest."""
        self.engine, self.tokens, self.version = engine, tokens, version

    async def decide(self, request: DecisionRequest) -> list[str]:
        """See `Decider`."""
        return list((await draw(request, self.engine, self.tokens, version=self.version)).orders)


async def draw(
    request: DecisionRequest,
    engine: CompletionSource,
    tokens: Tokens,
    *,
    version: int | None = None,
    shown: str | None = None,
    repetition: int = 0,
) -> Decision:
    """Draw one decision; its outcome is open.

    Args:
        version: the policy version; None: the newest.
        shown: `board_text` of the board for this power, if the caller has computed it.
        repetition: number of the draw, from 0, if one request is drawn several times. Each draw has its own seed.

    Raises:
        EngineError, DataError: the engine could not generate the decision.
    """
    legal, suffix = request.legal, (repetition,) if repetition else ()
    table = tokens.tables.table(legal)
    prompt_ids = tokens.prompt_ids(request.board, legal, shown)
    seed = seed_of(request.dice, request.ply, request.power, *suffix)
    generation_request = GenerationRequest(
        request_id="/".join(str(part) for part in (request.game, request.ply, request.power, *suffix)),
        prompt_ids=prompt_ids,
        table=table,
        seed=seed,
        temperature=request.temperature,
        snapshot_id=request.snapshot_id,
        version=version,
    )
    if version is None:
        generation = await _generate_under_newest(engine, generation_request)
    else:
        generation = await engine.generate(generation_request)
    completion = generation.token_ids.tolist()
    legal_ids, legal_offsets = table.legal_sets(completion)
    return Decision(
        snapshot_id=request.snapshot_id,
        ply=request.ply,
        power=request.power,
        phase=request.board.phase,
        seed=seed,
        policy_version=generation.policy.version,
        adapter_hash=generation.policy.adapter_hash,
        worker=generation.worker,
        input_ids=np.concatenate([np.asarray(prompt_ids, np.int32), generation.token_ids]),
        prompt_len=len(prompt_ids),
        behaviour_logprobs=generation.logprobs,
        legal_ids=legal_ids,
        legal_offsets=legal_offsets,
        temperature=request.temperature,
        orders=tokens.tables.read(completion, legal),
        queue_ms=generation.queue_ms,
        prefill_ms=generation.prefill_ms,
        decode_ms=generation.decode_ms,
        cached_tokens=generation.cached_tokens,
    )


async def _generate_under_newest(engine: CompletionSource, request: GenerationRequest) -> Generation:
    """Generate under the newest version. Try again if that version was retired while the request waited."""
    for _ in range(_RETIRED_VERSIONS_MAX):
        try:
            return await engine.generate(request)
        except VersionGoneError:
            continue
    return await engine.generate(request)
