"""Plays one fork: from a frozen position to its horizon, by the policy, scripted players and other deciders.

Forks run concurrently, and so do the decisions of one ply. A failed request ends only its own fork, with a status and a reason.
Reward components are computed here: each covers the time from a decision to the same power's next one, or to the fork's end.
"""

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.players import player
from entente.game.scores import SOLO_CENTRES, Standing, components, compute_standing, horizon_reached
from entente.players.deciders import CompletionSource, Decider, DecisionRequest, Tokens, draw
from entente.players.opponents import POLICY
from entente.players.seeds import dice
from entente.records.rows import Decision, Ply
from entente.telemetry.errors import DataError, EngineError

__all__ = ["POLICY", "ForkPlan", "PlayedFork", "Tokens", "play_fork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlan:
    """What one fork plays."""

    name: str
    """Unique within the run. Request ids contain it."""
    shared_name: str
    """Name of the start group. It seeds the scripted players, so that forks of a group share their random numbers."""
    seats: Mapping[str, str]
    """Power -> POLICY, the name of a decider or the name of a scripted player; all seven powers."""
    horizon_years: int
    """Counts of centres from `counted_from` to the end."""
    settled_years: int = 0
    """Game years without a change of centres after which the fork ends; 0: no such end."""
    temperature: float
    snapshot_id: str
    counted_from: str = ""
    """Phase from which the horizon is counted; empty: the fork's first phase."""
    dice: str = ""
    """Name that seeds the policy's draws; empty: `name`."""


@dataclass(slots=True, kw_only=True)
class PlayedFork:
    """The result of a fork."""

    decisions: list[Decision] = field(default_factory=list)
    """Decisions of the policy, by ply, each with its outcome."""
    plies: list[Ply] = field(default_factory=list)
    start: Standing | None = None
    end: Standing | None = None
    status: str = "complete"
    """complete | failed."""
    reason: str = ""
    """Why the fork failed; empty if it did not."""
    rejected: int = 0
    """Number of orders of all seats that the game engine refused; it must be 0."""
    ended: str = ""
    """horizon | won | drawn (after a hundred years) | eliminated (no power of the policy is left) | settled | failed."""


async def play_fork(
    plan: ForkPlan,
    board: Board,
    engine: CompletionSource | None,
    tokens: Tokens | None,
    *,
    deciders: Mapping[str, Decider] | None = None,
    record_plies: bool = True,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> PlayedFork:
    """Play until the horizon, or until an earlier end (see `PlayedFork.ended`). `board` is changed and then released.

    Args:
        engine: draws the policy's decisions; None if no seat is POLICY.
        tokens: None if `engine` is None.
        deciders: by name of their seat; their decisions are played but not recorded.
        record_plies: record positions, orders and results for replay.
        on_phase: called with the name of each phase that was played.

    Returns:
        the fork; its `status` is "failed" if a decision failed.
    """
    deciders = deciders or {}
    standing = compute_standing(board)
    fork, end_rule = PlayedFork(start=standing), _EndRule(plan, board)
    befores: list[Standing] = []  # of each decision
    ply = 0
    while not (reason_to_end := end_rule.reason_to_end(board, ply)):
        began = time.perf_counter()
        legal = board.legal_orders()
        legal_s = time.perf_counter() - began
        phase, before = board.phase, standing
        policy_powers = [power for power in legal if plan.seats[power] == POLICY and not legal[power].is_forced]
        others = {
            power: decider
            for power in legal
            if (decider := deciders.get(plan.seats[power])) is not None and not legal[power].is_forced
        }
        orders = _scripted_orders(plan, legal, board, skip=[*policy_powers, *others], without_script=deciders)
        try:
            drawn, decided = await asyncio.gather(
                _draw_decisions(plan, board, legal, policy_powers, ply, engine, tokens),
                _ask_deciders(plan, board, legal, others, ply),
            )
        except (EngineError, DataError) as error:
            fork.status, fork.reason, reason_to_end = "failed", str(error), "failed"
            break
        orders |= {power: decision.orders for power, decision in drawn.items()} | decided
        position = _ply(ply, board) if record_plies else None
        began = time.perf_counter()
        played = board.step(orders)
        standing = compute_standing(board, before, played)
        engine_ms = 1e3 * (legal_s + time.perf_counter() - began)
        fork.rejected += sum(played.rejected.values())
        fork.decisions += [
            replace(decision, orders_rejected=played.rejected.get(power, 0), engine_ms=engine_ms)
            for power, decision in drawn.items()
        ]
        befores += [before] * len(drawn)
        if position is not None:
            fork.plies.append(replace(position, orders=json.dumps(played.orders), results=json.dumps(played.results)))
        ply += 1
        on_phase(phase)
    if record_plies and fork.status == "complete" and not board.is_over:
        fork.plies.append(_ply(ply, board))
    fork.end, fork.ended = standing, reason_to_end
    fork.decisions = _with_outcomes(fork, befores)
    board.release()
    return fork


def _with_outcomes(fork: PlayedFork, befores: Sequence[Standing]) -> list[Decision]:
    """The decisions with how the fork ended, and what each brought until the same power's next decision or the end."""
    assert fork.end is not None
    following: dict[str, Standing] = {}
    found: list[Decision] = []
    for decision, before in zip(reversed(fork.decisions), reversed(befores), strict=True):
        parts: dict[str, Any] = components(before, following.get(decision.power, fork.end), decision.power)
        following[decision.power] = before
        found.append(replace(decision, status=fork.status, reason=fork.reason, ended=fork.ended, **parts))
    return found[::-1]


def _ply(ply: int, board: Board) -> Ply:
    """The current position, without orders."""
    snapshot = board.snapshot(game_id="", seed=0, source="")
    return Ply(ply=ply, phase=board.phase, snapshot_id=snapshot.snapshot_id, position=snapshot.position)


class _EndRule:
    """Decides when a fork ends, and why."""

    def __init__(self, plan: ForkPlan, board: Board) -> None:
        self._plan, self._start = plan, plan.counted_from or board.phase
        self._policy_powers = [power for power, seat in plan.seats.items() if seat == POLICY]
        self._centres, self._changed = board.centres(), board.phase

    def reason_to_end(self, board: Board, ply: int) -> str:
        """Why the fork ends before this ply; empty if it continues."""
        if board.is_over:
            return "won" if max(board.centre_counts()) >= SOLO_CENTRES else "drawn"
        if not ply:
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


def _scripted_orders(
    plan: ForkPlan,
    legal: Mapping[str, LegalOrders],
    board: Board,
    *,
    skip: Collection[str],
    without_script: Collection[str],
) -> dict[str, list[str]]:
    """Orders of scripted seats, and of other seats with a single legal order set. Seeded by group, phase and power."""
    orders: dict[str, list[str]] = {}
    for power, choices in legal.items():
        if power not in skip:
            seat = plan.seats[power]
            rng = dice(plan.shared_name, board.phase, power)
            orders[power] = player("random" if seat == POLICY or seat in without_script else seat)(choices, rng, board)
    return orders


def _request(plan: ForkPlan, board: Board, legal: LegalOrders, ply: int) -> DecisionRequest:
    return DecisionRequest(
        game=plan.name,
        dice=plan.dice or plan.name,
        ply=ply,
        power=legal.power,
        legal=legal,
        board=board,
        snapshot_id=plan.snapshot_id,
        temperature=plan.temperature,
        shared=plan.shared_name,
    )


async def _draw_decisions(
    plan: ForkPlan,
    board: Board,
    legal: Mapping[str, LegalOrders],
    powers: list[str],
    ply: int,
    engine: CompletionSource | None,
    tokens: Tokens | None,
) -> dict[str, Decision]:
    """Draw the decisions of all `powers` concurrently."""
    if not powers:
        return {}
    assert engine is not None and tokens is not None, "a policy seat needs an engine"
    shown = tokens.shared_board(board)
    drawn = (draw(_request(plan, board, legal[power], ply), engine, tokens, shown=shown) for power in powers)
    return dict(zip(powers, await asyncio.gather(*drawn), strict=True))


async def _ask_deciders(
    plan: ForkPlan, board: Board, legal: Mapping[str, LegalOrders], deciders: Mapping[str, Decider], ply: int
) -> dict[str, list[str]]:
    """Get the orders of all deciders, by power, concurrently."""
    decided = (decider.decide(_request(plan, board, legal[power], ply)) for power, decider in deciders.items())
    return {power: list(orders) for power, orders in zip(deciders, await asyncio.gather(*decided), strict=True)}
