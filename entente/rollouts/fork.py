"""Plays one fork, from a frozen position to its horizon. All seats have the same interface; the policy's samples become rows.

Forks run concurrently, and so do the decisions of one phase. A failed request ends only its own fork, with a status and a reason.
Reward components cover the time from a decision to the same power's next one, or to the fork's end.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.scores import SOLO_CENTRES, PowerScores, components, compute_power_scores, horizon_reached
from entente.game.scripted import player
from entente.game.snapshot import Snapshot
from entente.players.opponents import POLICY
from entente.players.policy import Decider, DecisionRequest, Sampled, orders_of
from entente.players.seeds import seeded_rng
from entente.records.rows import Decision, PlayedPhase, decision_id
from entente.telemetry.errors import DataError, EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlan:
    name: str
    """Unique within the run. Request ids contain it."""
    shared_name: str
    """Name of the start group. It seeds the scripted players, so that forks of a group share their random numbers."""
    seats: Mapping[str, str]
    """Power -> name of its player; all seven powers. Only decisions of POLICY become rows."""
    horizon_years: int
    """Number of yearly centre counts from `counted_from` to the end."""
    settled_years: int = 0
    """Game years without a change of centres after which the fork ends; 0: never."""
    temperature: float
    snapshot_id: str
    counted_from: str = ""
    """Phase from which the horizon is counted; empty: the fork's first phase."""
    rng_name: str = ""
    """Name that seeds the policy's samples; empty: `name`."""
    producer: str = ""
    """Name of the producer of its rows. This and the next four are columns of its rows, and empty where rows are not kept."""
    start_group: int = 0
    fork: int = 0
    game_id: str = ""
    opponents: str = ""


@dataclass(slots=True, kw_only=True)
class PlayedFork:
    decisions: list[Decision] = field(default_factory=list)
    phases: list[PlayedPhase] = field(default_factory=list)
    start: PowerScores | None = None
    end: PowerScores | None = None
    status: str = "complete"
    """complete | failed."""
    reason: str = ""
    rejected: int = 0
    """Number of orders of all seats that the game engine refused; it must be 0."""
    ended: str = ""
    """horizon | won | drawn (after a hundred years) | eliminated (no power of the policy is left) | settled | failed."""


async def play_fork(
    plan: ForkPlan,
    board: Board,
    players: Mapping[str, Decider],
    *,
    record_phases: bool = True,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> PlayedFork:
    """Play until the horizon, or an earlier end (see `PlayedFork.ended`). Mutates `board`, then releases it.

    Args:
        players: by the name of their seat; other seats are scripted players.
        record_phases: record positions, orders and results for replay.

    Returns:
        the fork; its `status` is "failed" if a decision failed.
    """
    power_scores = compute_power_scores(board)
    fork, end_rule, sampled = PlayedFork(start=power_scores), _EndRule(plan, board), list[_SampledDecision]()
    phase_index = 0
    while not (reason_to_end := end_rule.reason_to_end(board, phase_index)):
        began = time.perf_counter()
        legal = board.legal_orders()
        legal_s = time.perf_counter() - began
        phase, before = board.phase, power_scores
        try:
            decided = await _decide(plan, board, legal, players, phase_index)
        except (EngineError, DataError) as error:
            fork.status, fork.reason, reason_to_end = "failed", str(error), "failed"
            break
        snapshot = board.snapshot(game_id="", seed=0, source="") if record_phases else None
        began = time.perf_counter()
        played = board.step({power: orders_of(each) for power, each in decided.items()})
        power_scores = compute_power_scores(board, before, played)
        engine_ms = 1e3 * (legal_s + time.perf_counter() - began)
        fork.rejected += sum(played.rejected.values())
        sampled += [
            _SampledDecision(phase_index, phase, power, each, before, played.rejected.get(power, 0), engine_ms)
            for power, each in decided.items()
            if plan.seats[power] == POLICY and isinstance(each, Sampled)
        ]
        if snapshot is not None:
            fork.phases.append(_played_phase(plan, phase_index, snapshot, json.dumps(played.orders), json.dumps(played.results)))
        phase_index += 1
        on_phase(phase)
    if record_phases and fork.status == "complete" and not board.is_over:
        fork.phases.append(_played_phase(plan, phase_index, board.snapshot(game_id="", seed=0, source="")))
    fork.end, fork.ended = power_scores, reason_to_end
    fork.decisions = _rows(plan, fork, sampled, power_scores)
    board.release()
    return fork


async def _decide(
    plan: ForkPlan, board: Board, legal: Mapping[str, LegalOrders], players: Mapping[str, Decider], phase_index: int
) -> dict[str, Sequence[str] | Sampled]:
    """The decisions of all powers, made concurrently. Powers with one legal order set have it without a request."""
    decided: dict[str, Sequence[str] | Sampled] = {}
    asked: dict[str, Awaitable[Sequence[str] | Sampled]] = {}
    for power, own in legal.items():
        seat = plan.seats[power]
        if own.is_forced:
            decided[power] = own.only_orders()
        elif seat in players:
            asked[power] = players[seat].decide(_request(plan, board, own, phase_index))
        else:  # scripted players of a group's forks share their seeds
            decided[power] = player(seat)(own, seeded_rng(plan.shared_name, board.phase, power), board)
    decided |= zip(asked, await asyncio.gather(*asked.values()), strict=True)
    return decided


def _request(plan: ForkPlan, board: Board, legal: LegalOrders, phase_index: int) -> DecisionRequest:
    return DecisionRequest(
        game=plan.name,
        rng_name=plan.rng_name or plan.name,
        phase_index=phase_index,
        power=legal.power,
        legal=legal,
        board=board,
        snapshot_id=plan.snapshot_id,
        temperature=plan.temperature,
        shared=plan.shared_name,
    )


@dataclass(slots=True)
class _SampledDecision:
    phase_index: int
    phase: str
    power: str
    sampled: Sampled
    before: PowerScores
    rejected: int
    engine_ms: float


def _rows(plan: ForkPlan, fork: PlayedFork, sampled: Sequence[_SampledDecision], end: PowerScores) -> list[Decision]:
    following: dict[str, PowerScores] = {}
    rows: list[Decision] = []
    for each in reversed(sampled):
        parts: dict[str, Any] = components(each.before, following.get(each.power, end), each.power)
        following[each.power] = each.before
        answer, generation = each.sampled, each.sampled.generation
        rows.append(
            Decision(
                decision_id=decision_id(plan.producer, plan.start_group, plan.fork, each.phase_index, each.power),
                snapshot_id=plan.snapshot_id,
                start_group=plan.start_group,
                fork=plan.fork,
                phase_index=each.phase_index,
                power=each.power,
                phase=each.phase,
                game_id=plan.game_id,
                seed=answer.seed,
                opponents=plan.opponents,
                policy_version=generation.policy.version,
                adapter_hash=generation.policy.adapter_hash,
                worker=generation.worker,
                input_ids=np.concatenate([np.asarray(answer.prompt_ids, np.int32), generation.token_ids]),
                prompt_len=len(answer.prompt_ids),
                behaviour_logprobs=generation.logprobs,
                legal_ids=answer.legal_ids,
                legal_offsets=answer.legal_offsets,
                temperature=plan.temperature,
                orders=answer.orders,
                orders_rejected=each.rejected,
                status=fork.status,
                reason=fork.reason,
                ended=fork.ended,
                queue_ms=generation.queue_ms,
                prefill_ms=generation.prefill_ms,
                decode_ms=generation.decode_ms,
                engine_ms=each.engine_ms,
                cached_tokens=generation.cached_tokens,
                **parts,
            )
        )
    return rows[::-1]


def _played_phase(plan: ForkPlan, phase_index: int, snapshot: Snapshot, orders: str = "{}", results: str = "{}") -> PlayedPhase:
    return PlayedPhase(
        start_group=plan.start_group,
        fork=plan.fork,
        phase_index=phase_index,
        phase=snapshot.phase,
        snapshot_id=snapshot.snapshot_id,
        position=snapshot.position,
        orders=orders,
        results=results,
    )


class _EndRule:
    def __init__(self, plan: ForkPlan, board: Board) -> None:
        self._plan, self._start = plan, plan.counted_from or board.phase
        self._policy_powers = [power for power, seat in plan.seats.items() if seat == POLICY]
        self._centres, self._changed = board.centres(), board.phase

    def reason_to_end(self, board: Board, phase_index: int) -> str:
        """Why the fork ends before this phase; empty if it continues."""
        if board.is_over:
            return "won" if max(board.centre_counts()) >= SOLO_CENTRES else "drawn"
        if not phase_index:
            return ""
        if horizon_reached(self._start, board.phase, self._plan.horizon_years):
            return "horizon"
        if self._policy_powers and not any(board.is_alive(power) for power in self._policy_powers):
            return "eliminated"
        if self._plan.settled_years:
            if (centres := board.centres()) != self._centres:
                self._centres, self._changed = centres, board.phase
            elif horizon_reached(self._changed, board.phase, self._plan.settled_years):
                return "settled"
        return ""
