"""Requests of the decode benchmark: decisions of real rollouts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from entente.game.board import Board
from entente.game.legal import LegalOrders
from entente.game.players import player
from entente.game.snapshot import Snapshot
from entente.records.generation import Generation, GenerationRequest
from entente.rollouts.fork import Tokens


def played_positions(games: int, seed: int) -> list[Snapshot]:
    """One movement phase of each game of `mover`, from 1902 on."""
    found = []
    for game in range(games):
        dice, board, first = random.Random(f"decode {seed} {game}"), Board.start(), 1902 + game % 4
        while not board.is_over and (board.phase_type != "M" or board.year < first):
            board.step({power: player("mover")(legal, dice, board) for power, legal in board.legal_orders().items()})
        found.append(board.snapshot(game_id=f"decode-{game}", seed=game, source="benchmark"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One decision with its own copy of the board."""

    board: Board
    legal: LegalOrders
    snapshot_id: str


def rollout_cases(positions: Sequence[Snapshot], *, forks: int, phases: int) -> list[Case]:
    """The open decisions of all powers in forks of `positions`, in the order of a rollout.

    Random players play the forks, so they diverge as they would with an untrained policy.
    """
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
            dice = random.Random(f"fork {snapshot.snapshot_id} {fork} {phase}")
            board.step({power: player("random")(own, dice, board) for power, own in legal.items()})
    return cases


def requests_for(cases: Sequence[Case], tokens: Tokens, label: str) -> list[GenerationRequest]:
    """The cases as requests, with the prompts of `tokens`."""
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


@dataclass(slots=True)
class RecordingEngine:
    """Passes requests to an engine and keeps them with their generations."""

    engine: Any
    asked: list[GenerationRequest] = field(default_factory=list)
    """In the order in which they arrived."""
    drawn: list[tuple[GenerationRequest, Generation]] = field(default_factory=list)
    """In the order in which they were drawn."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.asked.append(request)
        generation = await self.engine.generate(request)
        self.drawn.append((request, generation))
        return generation
