"""One fork: a frozen position played on to its horizon, by the policy and by scripted players.

Forks advance independently; within a ply the policy's powers decide at the same time, and no request waits for another's answer.
A failed request ends its fork with a status and a reason; it never ends the others. Nothing is written here.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from game.board import Board
from game.legal import LegalOrders
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.prompts import board_text, power_text, rules_text
from game.scores import SOLO_CENTRES, Standing, horizon_reached, standing
from inference.engine import Engine, Generation, GenerationRequest
from rollouts.seeds import dice, seed_of
from telemetry.errors import DataError, EngineError, VersionGoneError

_VERSIONS_MISSED = 3
"""Versions that may be retired under one request before its fork gives up."""
POLICY = "policy"
"""Seat of a power that the language model plays; any other seat names a scripted player."""


class Tokens:
    """What turns a decision into tokens and back, for one model: how prompts are written, their ids, the legal tables."""

    def __init__(self, codec: Codec, prompts: PromptSettings = DEFAULT_PROMPTS) -> None:
        self.codec, self.prompts = codec, prompts
        self.tables = TableBuilder(codec, prompts.order_notation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlan:
    """What to play."""

    name: str
    """Unique within the run; request ids and the policy's draws derive from it."""
    shared_name: str
    """The start group's name: scripted players' dice derive from it, so that forks share their random numbers."""
    seats: Mapping[str, str]
    """Power -> POLICY or the name of a scripted player, for all seven."""
    horizon_years: int
    settled_years: int = 0
    """Years without any centre changing hands after which the fork ends; 0: never for that."""
    temperature: float
    snapshot_id: str
    counted_from: str = ""
    """Phase from which the horizon is counted; empty: the fork's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One decision as it was drawn, with the board before it."""

    ply: int
    power: str
    phase: str
    seed: int
    prompt_ids: list[int]
    generation: Generation
    legal_ids: np.ndarray
    """int32: legal sets of the completion's positions, concatenated."""
    legal_offsets: np.ndarray
    """int32 [completion tokens + 1]."""
    orders: tuple[str, ...]
    before: Standing
    rejected: int
    """Orders of it that the game engine refused."""
    engine_ms: float
    """Milliseconds in the game engine at this ply: legal orders and adjudication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPly:
    """One phase of a fork as it was played; the last is the position that the fork ended at, which nobody ordered in."""

    ply: int
    phase: str
    snapshot_id: str
    position: str
    orders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    results: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class PlayedFork:
    """A fork's whole course."""

    drawn: list[Drawn] = field(default_factory=list)
    plies: list[PlayedPly] = field(default_factory=list)
    start: Standing | None = None
    end: Standing | None = None
    status: str = "complete"
    reason: str = ""
    ended: str = ""
    """horizon | won | drawn (after a hundred years) | eliminated (nobody of the policy is left) | settled | failed."""


async def play_fork(
    plan: ForkPlan, board: Board, engine: Engine | None, tokens: Tokens | None, *, record_plies: bool = True
) -> PlayedFork:
    """Play `board` (which is consumed) until `plan.horizon_years` have passed, or nothing is left to play for.

    Args:
        engine: draws the policy's decisions; None where every seat is scripted.
        tokens: as `engine`.
        record_plies: keep positions, orders and results for replay.

    Returns:
        the course; `status` is "failed" where the engine refused or failed, with the reason.
    """
    now = standing(board)
    course, watch = PlayedFork(start=now), _Watch(plan, board)
    ply = 0
    while not (reason_to_end := watch.reason_to_end(board, ply)):
        began = time.perf_counter()
        legal = board.legal_orders()
        legal_s = time.perf_counter() - began
        phase, before = board.phase, now
        asked = [power for power in legal if plan.seats[power] == POLICY and not legal[power].is_forced]
        orders = _scripted_orders(plan, legal, board, skip=asked)
        if asked:
            assert engine is not None and tokens is not None, "a policy seat needs an engine"
            try:
                answers = await _decide(plan, board, legal, asked, ply, engine, tokens)
            except (EngineError, DataError) as error:
                course.status, course.reason, reason_to_end = "failed", str(error), "failed"
                break
            orders |= {power: answer[3] for power, answer in answers.items()}
        else:
            answers = {}
        frozen = _ply(ply, board) if record_plies else None
        began = time.perf_counter()
        played = board.step(orders)
        now = standing(board, before, played)
        engine_ms = 1e3 * (legal_s + time.perf_counter() - began)
        for power, (seed, prompt_ids, generation, texts, legal_sets) in answers.items():
            course.drawn.append(
                Drawn(
                    ply=ply,
                    power=power,
                    phase=phase,
                    seed=seed,
                    prompt_ids=prompt_ids,
                    generation=generation,
                    legal_ids=legal_sets[0],
                    legal_offsets=legal_sets[1],
                    orders=tuple(texts),
                    before=before,
                    rejected=played.rejected.get(power, 0),
                    engine_ms=engine_ms,
                )
            )
        if frozen is not None:
            course.plies.append(replace(frozen, orders=played.orders, results=played.results))
        ply += 1
    if record_plies and course.status == "complete" and not board.is_over:
        course.plies.append(_ply(ply, board))
    course.end, course.ended = now, reason_to_end
    return course


def _ply(ply: int, board: Board) -> PlayedPly:
    """The position as it stands, nothing ordered yet."""
    frozen = board.snapshot(game_id="", seed=0, source="")
    return PlayedPly(ply=ply, phase=board.phase, snapshot_id=frozen.snapshot_id, position=frozen.position)


class _Watch:
    """Tells when a fork has nothing left to play for, and why."""

    def __init__(self, plan: ForkPlan, board: Board) -> None:
        self._plan, self._start = plan, plan.counted_from or board.phase
        self._policy = [power for power, seat in plan.seats.items() if seat == POLICY]
        self._centres, self._changed = board.centres(), board.phase

    def reason_to_end(self, board: Board, ply: int) -> str:
        """Why the fork ends before this ply; empty while it goes on."""
        if board.is_over:
            return "won" if max(board.centre_counts()) >= SOLO_CENTRES else "drawn"
        if not ply:
            return ""
        if horizon_reached(self._start, board.phase, self._plan.horizon_years):
            return "horizon"
        if self._policy and not any(board.is_alive(power) for power in self._policy):
            return "eliminated"
        if self._plan.settled_years:
            if (centres := board.centres()) != self._centres:
                self._centres, self._changed = centres, board.phase
            elif horizon_reached(self._changed, board.phase, self._plan.settled_years):
                return "settled"
        return ""


async def _drawn_by_the_newest(engine: Engine, request: GenerationRequest) -> Generation:
    """Draw under the newest version; again where that was retired while the request waited."""
    for _ in range(_VERSIONS_MISSED):
        try:
            return await engine.generate(request)
        except VersionGoneError:
            continue
    return await engine.generate(request)


def _scripted_orders(plan: ForkPlan, legal: Mapping[str, LegalOrders], board: Board, skip: list[str]) -> dict[str, list[str]]:
    """Orders of scripted seats, and of policy seats whose order set is forced; dice by group, phase and power."""
    orders: dict[str, list[str]] = {}
    for power, choice in legal.items():
        if power not in skip:
            seat = plan.seats[power]
            rng = dice(plan.shared_name, board.phase, power)
            orders[power] = player("random" if seat == POLICY else seat)(choice, rng, board)
    return orders


_Answer = tuple[int, list[int], Generation, list[str], tuple[np.ndarray, np.ndarray]]
"""Seed, prompt ids, generation, order texts, legal sets (ids, offsets)."""


async def _decide(
    plan: ForkPlan,
    board: Board,
    legal: Mapping[str, LegalOrders],
    asked: list[str],
    ply: int,
    engine: Engine,
    tokens: Tokens,
) -> dict[str, _Answer]:
    """Draw the decisions of all `asked` powers of this ply at the same time."""
    rules, position = rules_text(tokens.prompts), board_text(board)

    async def decide(power: str) -> _Answer:
        choice = legal[power]
        table = tokens.tables.table(choice)
        prompt_ids = tokens.codec.encode_prompt((rules, position, power_text(choice, board, tokens.prompts)))
        seed = seed_of(plan.name, ply, power)
        request = GenerationRequest(
            request_id=f"{plan.name}/{ply}/{power}",
            prompt_ids=prompt_ids,
            table=table,
            seed=seed,
            temperature=plan.temperature,
            snapshot_id=plan.snapshot_id,
        )
        generation = await _drawn_by_the_newest(engine, request)
        completion = generation.token_ids.tolist()
        return (
            seed,
            prompt_ids,
            generation,
            tokens.tables.read(completion, choice),
            table.legal_sets(completion),
        )

    answers = await asyncio.gather(*(decide(power) for power in asked))
    return dict(zip(asked, answers, strict=True))
