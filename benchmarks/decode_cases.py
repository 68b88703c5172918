"""Requests of benchmarks: decisions in forks of random players, and whole rollouts of a training step."""

import asyncio
import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.scripted import player
from entente.game.snapshot import Snapshot
from entente.players.opponents import POLICY
from entente.players.policy import PolicyPlayer, Tokens
from entente.records.rows import Generation, GenerationRequest
from entente.rollouts.groups import decisions_of, plan_start_groups, roll_out
from entente.rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions


def played_positions(games: int, seed: int) -> list[Snapshot]:
    """One movement phase of each game of `mover`, from 1902 on."""
    snapshots = []
    for game in range(games):
        rng, board, first = random.Random(f"decode {seed} {game}"), Board.start(), 1902 + game % 4
        while not board.is_over and (board.phase_type != "M" or board.year < first):
            board.step({power: player("mover")(legal, rng, board) for power, legal in board.legal_orders().items()})
        snapshots.append(board.snapshot(game_id=f"decode-{game}", seed=game, source="benchmark"))
    return snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    board: Board
    legal: LegalOrders
    snapshot_id: str


def rollout_cases(positions: Sequence[Snapshot], *, forks: int, phases: int) -> list[Case]:
    """All powers' decisions with a choice, in rollout order. Random players make forks diverge as an untrained policy does."""
    live = [(snapshot, fork, Board.restore(snapshot)) for snapshot in positions for fork in range(forks)]
    cases = []
    for phase in range(phases):
        for snapshot, fork, board in live:
            if board.is_over:
                continue
            legal, kept = board.legal_orders(), board.fork()
            cases += [
                Case(board=kept, legal=own, snapshot_id=snapshot.snapshot_id) for own in legal.values() if not own.is_forced
            ]
            rng = random.Random(f"fork {snapshot.snapshot_id} {fork} {phase}")
            board.step({power: player("random")(own, rng, board) for power, own in legal.items()})
    return cases


def requests_for(cases: Sequence[Case], tokens: Tokens, label: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{label}/{number}",
            prompt_ids=tokens.prompt_ids(case.board, case.legal),
            table=tokens.tables.table(case.legal),
            seed=number,
            snapshot_id=case.snapshot_id,
        )
        for number, case in enumerate(cases)
    ]


async def sample(engine: Any, requests: Sequence[GenerationRequest], in_flight: int = 0) -> list[Generation]:
    """Generate all requests, at most `in_flight` at a time; 0: all at once."""
    limit = asyncio.Semaphore(in_flight or len(requests))

    async def one(request: GenerationRequest) -> Generation:
        async with limit:
            return await engine.generate(request)

    return await asyncio.gather(*map(one, requests))


@dataclass(slots=True)
class FreshPrefixes:
    """An engine whose prompts start with the token `first`, so that no prefix cached under another `first` serves them: vLLM's
    cache cannot be emptied from here."""

    engine: Any
    first: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        return await self.engine.generate(replace(request, prompt_ids=[self.first, *request.prompt_ids[1:]]))


# -- whole rollouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    positions: Sequence[Snapshot]
    rollouts: RolloutSettings
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedStep:
    cases: list[Case]
    """Every decision, in the order of the requests."""
    sampled: list[tuple[GenerationRequest, Generation]]
    """In the same order."""
    decisions: int
    """Decisions kept for training."""


@dataclass(slots=True)
class RecordingEngine:
    engine: Any
    asked: list[GenerationRequest] = field(default_factory=list)
    sampled: dict[str, Generation] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        self.sampled[request.request_id] = generation = await self.engine.generate(request)
        return generation


async def record_step(inputs: RunInputs, step: int, engine: Any, model_tokens: Tokens) -> PlayedStep:
    """Roll out the start groups of `step`, counted from 1, as a run does."""
    recording: Any = RecordingEngine(engine)
    tokens, rollouts = copy(model_tokens), inputs.rollouts
    cases: list[Case] = []

    def prompt_ids(board: Board, legal: LegalOrders) -> list[int]:
        cases.append(Case(board=board.fork(), legal=legal, snapshot_id=""))
        return model_tokens.prompt_ids(board, legal)

    tokens.prompt_ids = prompt_ids  # type: ignore[method-assign]
    positions = sample_start_positions(inputs.positions, rollouts.start_groups, inputs.seed, step)
    groups = plan_start_groups(positions, (step - 1) * rollouts.start_groups, rollouts)
    played = await roll_out(groups, {POLICY: PolicyPlayer(recording, tokens)}, rollouts, producer="benchmark", seed=inputs.seed)
    return PlayedStep(
        # A rollout encodes a prompt right before its request, so both lists have the same order.
        cases=[replace(case, snapshot_id=asked.snapshot_id) for case, asked in zip(cases, recording.asked, strict=True)],
        sampled=[(request, recording.sampled[request.request_id]) for request in recording.asked],
        decisions=len(decisions_of(played)),
    )
