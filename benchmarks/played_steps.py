"""Whole rollouts: the start groups of a run's step, played on an engine as the run plays them.

`record_step` keeps every decision in the order in which the rollouts asked for it, so plies occur in their real proportions.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from benchmarks.decode_cases import Case, RecordingEngine
from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.snapshot import Snapshot
from entente.players.deciders import CompletionSource
from entente.records.generation import Generation, GenerationRequest
from entente.rollouts.fork import PlayedFork, Tokens
from entente.rollouts.roll_out import decisions_of, plan_start_groups, roll_out
from entente.rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """What the rollouts of a run start from."""

    positions: Sequence[Snapshot]
    rollouts: RolloutSettings
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    """The rollouts of one step."""

    cases: list[Case]
    """Every decision, in the order in which they were asked for."""
    drawn: list[tuple[GenerationRequest, Generation]]
    """In the same order."""
    decisions: int
    """Decisions kept for training."""


async def play_step(inputs: RunInputs, step: int, engine: CompletionSource, tokens: Tokens) -> list[PlayedFork]:
    """Roll out the start groups of `step`, from 1, as a run does."""
    rollouts = inputs.rollouts
    positions = sample_start_positions(inputs.positions, rollouts.start_groups, inputs.seed, step)
    groups = plan_start_groups(positions, (step - 1) * rollouts.start_groups, rollouts)
    return await roll_out(groups, engine, tokens, rollouts, producer="benchmark", seed=inputs.seed)


async def record_step(inputs: RunInputs, step: int, engine: CompletionSource, model_tokens: Tokens) -> PlayedStep:
    """As `play_step`; returns every decision with its own copy of the board."""
    recording, tokens = RecordingEngine(engine), copy(model_tokens)
    cases: list[Case] = []

    def prompt_ids(board: Board, legal: LegalOrders, shown: str | None = None) -> list[int]:
        cases.append(Case(board=board.fork(), legal=legal, snapshot_id=""))
        return model_tokens.prompt_ids(board, legal, shown)

    tokens.prompt_ids = prompt_ids  # type: ignore[method-assign]
    played = await play_step(inputs, step, recording, tokens)
    place = {request.request_id: number for number, request in enumerate(recording.asked)}
    return PlayedStep(
        # A rollout makes a prompt right before its request, so both lists have the same order.
        cases=[replace(case, snapshot_id=asked.snapshot_id) for case, asked in zip(cases, recording.asked, strict=True)],
        drawn=sorted(recording.drawn, key=lambda pair: place[pair[0].request_id]),
        decisions=len(decisions_of(played)),
    )


def uncached_per_decision(*, prompt_tokens: float, cached_tokens: float, decisions: float) -> float:
    """Prompt tokens that the engine computed, over decisions kept for training. Whole rollouts only, warm-ups included."""
    return (prompt_tokens - cached_tokens) / decisions
