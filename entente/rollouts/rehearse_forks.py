"""Plays a few forks without a model, to estimate a run's decisions, tokens and bytes.

The forks start from real positions and run the code of a run's rollouts, but sample legal tokens uniformly and write nothing.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, count, pairwise
from operator import ne

import numpy as np

from entente.decoding.codec import Codec
from entente.game.board import Board
from entente.game.snapshot import Snapshot
from entente.inference.uniform_engine import UniformEngine
from entente.players.opponents import POLICY
from entente.players.policy import PolicyPlayer, Tokens
from entente.records.rows import Decision, Generation, GenerationRequest, PlayedPhase
from entente.rollouts.groups import decisions_of, phases_of, plan_start_groups, roll_out
from entente.rollouts.settings import RolloutSettings
from state_cache.build import play_source_game
from state_cache.sampling import sample_start_positions
from state_cache.settings import CacheSettings
from storage.arrow_files import to_table

_GROUPS, _FORKS, _YEARS = {"one": 12, "all": 2}, 2, 2
"""Start groups by the policy's powers, forks of each, years of a fork."""
_LAST_YEAR, _SOURCE_GAMES = 1906, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Means over the rehearsed forks, scaled to the horizon."""

    decisions_per_fork: float
    prompt_tokens: float
    """Per decision."""
    completion_tokens: float
    """Per decision."""
    longest_request: int
    """Tokens of the longest prompt with the longest completion that its legal orders allow."""
    unique_tokens: float
    """Per start group, all forks together: a shared prefix counts once."""
    fork_bytes: float


def rehearse(positions: Sequence[Snapshot], tokens: Tokens, settings: RolloutSettings, longest: int, seed: int) -> Rehearsal:
    """Play a few forks of two game years at most, and scale the figures to the horizon. Rows above `longest` tokens are cut,
    which happens with bytes as tokens."""
    years = min(_YEARS, settings.horizon_years)
    # Past versions cannot play here, and searches take too long.
    opponents = ",".join(settings.scripted_opponents) or "mover"
    shorter = settings.model_copy(update={"horizon_years": years, "forks_per_group": _FORKS, "opponents": opponents})
    starts = sample_start_positions(positions, _GROUPS[settings.policy_powers], seed, 1)
    engine = _LengthEngine()
    groups, policy = plan_start_groups(starts, 0, shorter), PolicyPlayer(engine, tokens)
    forks = asyncio.run(roll_out(groups, {POLICY: policy}, shorter, producer="rehearsal", seed=seed))
    rows = [replace(row, input_ids=row.input_ids[:longest]) for row in decisions_of(forks)]
    scale = settings.horizon_years / years / len(forks)
    return Rehearsal(
        decisions_per_fork=len(rows) * scale,
        prompt_tokens=float(np.mean([min(longest, row.prompt_len) for row in rows] or [0])),
        completion_tokens=float(np.mean([len(row.behaviour_logprobs) for row in rows] or [0])),
        longest_request=engine.longest,
        unique_tokens=_group_tokens(rows, settings.forks_per_group) * settings.horizon_years / years,
        fork_bytes=(to_table(rows).nbytes + to_table(phases_of(forks), PlayedPhase).nbytes) * scale,
    )


def _group_tokens(rows: Sequence[Decision], forks: int) -> float:
    """Mean of the start groups. Each further fork is assumed to add as many tokens as the second."""
    groups = {row.start_group for row in rows}
    first = sum(unique_tokens([row.input_ids for row in rows if (row.start_group, row.fork) == (group, 0)]) for group in groups)
    both = sum(unique_tokens([row.input_ids for row in rows if row.start_group == group]) for group in groups)
    return (first + (forks - 1) * (both - first)) / max(1, len(groups))


def unique_tokens(paths: Sequence[Sequence[int] | np.ndarray]) -> int:
    ordered = sorted(tuple(path) for path in paths)
    shared = sum(next(compress(count(), map(ne, *pair)), min(map(len, pair))) for pair in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def some_positions(settings: CacheSettings) -> list[Snapshot]:
    years = {"first_year": min(settings.first_year, _LAST_YEAR), "last_year": min(settings.last_year, _LAST_YEAR)}
    nearer = settings.model_copy(update=years)
    positions = [snapshot for game in range(_SOURCE_GAMES) for snapshot in play_source_game(game, nearer)]
    return positions or [Board.start().snapshot(game_id="start", seed=0, source="start")]


class BytesAsTokens(Codec):
    """Stands in for a tokenizer that is not downloaded: one token per byte, the most of any byte-level tokenizer."""

    def __init__(self) -> None:
        self._prepare(end_ids=(256,), vocabulary_size=257)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())


class _LengthEngine(UniformEngine):
    def __init__(self) -> None:
        super().__init__()
        self.longest = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.longest = max(self.longest, len(request.prompt_ids) + request.table.longest)
        return await super().generate(request)
