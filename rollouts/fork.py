"""One fork: a frozen position played on to its horizon, by the policy and by scripted players.

Forks advance independently; within a ply the policy's powers decide at the same time, and no request waits for another's answer.
A failed request ends its fork with a status and a reason; it never ends the others. Nothing is written here.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from game.board import Board
from game.legal import LegalOrders
from game.players import player
from game.scores import SOLO_CENTRES, Standing, compute_standing, horizon_reached
from inference.engine import Engine
from rollouts.deciders import Answer, Decider, Question, Tokens, draw, position_texts
from rollouts.seeds import dice
from telemetry.errors import DataError, EngineError

__all__ = ["POLICY", "ForkPlan", "PlayedDecision", "PlayedFork", "PlayedPly", "Tokens", "play_fork"]

POLICY = "policy"
"""Seat of a power that the language model plays, and whose decisions are kept; any other seat names a decider that was handed
over, or a scripted player."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlan:
    """What to play."""

    name: str
    """Unique within the run; request ids and the policy's draws derive from it."""
    shared_name: str
    """The start group's name: scripted players' dice derive from it, so that forks share their random numbers."""
    seats: Mapping[str, str]
    """Power -> POLICY, the name of a decider, or that of a scripted player, for all seven."""
    horizon_years: int
    settled_years: int = 0
    """Years without any centre changing hands after which the fork ends; 0: never for that."""
    temperature: float
    snapshot_id: str
    counted_from: str = ""
    """Phase from which the horizon is counted; empty: the fork's first."""
    dice: str = ""
    """Name that draws derive from; empty: `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedDecision:
    """One decision of the policy: the answer as it was drawn, and what became of it on the board."""

    ply: int
    power: str
    phase: str
    answer: Answer
    before: Standing
    """Standing of the position that the decision was asked for."""
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

    decisions: list[PlayedDecision] = field(default_factory=list)
    """Those of the policy."""
    plies: list[PlayedPly] = field(default_factory=list)
    start: Standing | None = None
    end: Standing | None = None
    status: str = "complete"
    reason: str = ""
    rejected: int = 0
    """Orders of all seats that the game engine refused; 0 unless something is wrong."""
    ended: str = ""
    """horizon | won | drawn (after a hundred years) | eliminated (nobody of the policy is left) | settled | failed."""


async def play_fork(
    plan: ForkPlan,
    board: Board,
    engine: Engine | None,
    tokens: Tokens | None,
    *,
    deciders: Mapping[str, Decider] | None = None,
    record_plies: bool = True,
) -> PlayedFork:
    """Play `board` (which is consumed) until `plan.horizon_years` have passed, or nothing is left to play for.

    Args:
        engine: draws the policy's decisions; None where every seat is scripted.
        tokens: as `engine`.
        deciders: who plays the seats of these names; what they decide is played and not kept.
        record_plies: keep positions, orders and results for replay.

    Returns:
        the course; `status` is "failed" where the engine refused or failed, with the reason.
    """
    now = compute_standing(board)
    course, watch, at_seat = PlayedFork(start=now), _Watch(plan, board), deciders or {}
    ply = 0
    while not (reason_to_end := watch.reason_to_end(board, ply)):
        began = time.perf_counter()
        legal = board.legal_orders()
        legal_s = time.perf_counter() - began
        phase, before = board.phase, now
        asked = [power for power in legal if plan.seats[power] == POLICY and not legal[power].is_forced]
        others = {power: who for power in legal if (who := at_seat.get(plan.seats[power])) and not legal[power].is_forced}
        orders = _scripted_orders(plan, legal, board, skip=[*asked, *others], without_script=at_seat)
        try:
            answers, decided = await asyncio.gather(
                _decide(plan, board, legal, asked, ply, engine, tokens), _ask(plan, board, legal, others, ply)
            )
        except (EngineError, DataError) as error:
            course.status, course.reason, reason_to_end = "failed", str(error), "failed"
            break
        orders |= {power: answer.orders for power, answer in answers.items()} | decided
        frozen = _ply(ply, board) if record_plies else None
        began = time.perf_counter()
        played = board.step(orders)
        now = compute_standing(board, before, played)
        engine_ms = 1e3 * (legal_s + time.perf_counter() - began)
        course.rejected += sum(played.rejected.values())
        course.decisions += [
            PlayedDecision(
                ply=ply,
                power=power,
                phase=phase,
                answer=answer,
                before=before,
                rejected=played.rejected.get(power, 0),
                engine_ms=engine_ms,
            )
            for power, answer in answers.items()
        ]
        if frozen is not None:
            course.plies.append(replace(frozen, orders=played.orders, results=played.results))
        ply += 1
    if record_plies and course.status == "complete" and not board.is_over:
        course.plies.append(_ply(ply, board))
    course.end, course.ended = now, reason_to_end
    board.release()
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


def _scripted_orders(
    plan: ForkPlan,
    legal: Mapping[str, LegalOrders],
    board: Board,
    *,
    skip: Collection[str],
    without_script: Collection[str],
) -> dict[str, list[str]]:
    """Orders of scripted seats, and of other seats whose order set is forced; dice by group, phase and power."""
    orders: dict[str, list[str]] = {}
    for power, choice in legal.items():
        if power not in skip:
            seat = plan.seats[power]
            rng = dice(plan.shared_name, board.phase, power)
            orders[power] = player("random" if seat == POLICY or seat in without_script else seat)(choice, rng, board)
    return orders


def _question(plan: ForkPlan, board: Board, choice: LegalOrders, ply: int) -> Question:
    return Question(
        game=plan.name,
        dice=plan.dice or plan.name,
        ply=ply,
        power=choice.power,
        legal=choice,
        board=board,
        snapshot_id=plan.snapshot_id,
        temperature=plan.temperature,
    )


async def _decide(
    plan: ForkPlan,
    board: Board,
    legal: Mapping[str, LegalOrders],
    asked: list[str],
    ply: int,
    engine: Engine | None,
    tokens: Tokens | None,
) -> dict[str, Answer]:
    """Draw the decisions of all `asked` powers of this ply at the same time."""
    if not asked:
        return {}
    assert engine is not None and tokens is not None, "a policy seat needs an engine"
    texts = position_texts(board, tokens)
    drawn = (draw(_question(plan, board, legal[power], ply), engine, tokens, texts=texts) for power in asked)
    return dict(zip(asked, await asyncio.gather(*drawn), strict=True))


async def _ask(
    plan: ForkPlan, board: Board, legal: Mapping[str, LegalOrders], deciders: Mapping[str, Decider], ply: int
) -> dict[str, list[str]]:
    """Have the deciders decide, each for its power, at the same time."""
    decided = (decider.decide(_question(plan, board, legal[power], ply)) for power, decider in deciders.items())
    return {power: list(orders) for power, orders in zip(deciders, await asyncio.gather(*decided), strict=True)}
