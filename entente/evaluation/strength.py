"""Strength: mean centres gained on held-out positions, with a 95 % interval.

All compared players get the same positions, powers, seeds and opponents' random numbers. Positions of one source game are
correlated, so the bootstrap resamples whole source games (`entente.evaluation.intervals`).
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from entente.decoding.thinking import Thought, thought_of
from entente.evaluation.intervals import Estimate, estimate, format_count
from entente.evaluation.settings import POWERS_PER_POSITION, SCORE_SEED, EvaluationSettings
from entente.game.board import POWERS, Board
from entente.game.snapshot import Snapshot
from entente.players.opponents import POLICY
from entente.players.policy import Decider, PolicyPlayer, Tokens
from entente.players.seeds import seeded_rng
from entente.records.rows import Decision
from entente.rollouts.fork import ForkPlan, play_fork
from entente.telemetry.errors import EngineError, InputError

OnFork = Callable[[int, int], None]
"""Called with the number of finished forks and the total."""
_OPENINGS_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    snapshot: Snapshot
    power: str
    orders: tuple[str, ...]
    """As sampled, with the same seed for every version."""
    probabilities: tuple[float, ...]
    """Probability of each order, given the thought and the orders before it."""
    thought: Thought | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Gain of one fork. Players with equal settings share its start and seed."""

    snapshot_id: str
    game_id: str
    """Source game of the position: the cluster."""
    power: str
    centres: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    mean: float
    """Mean centres gained per power over the horizon."""
    low: float | None
    high: float | None
    forks: int
    positions: int
    source_games: int
    orders_rejected: int
    openings: tuple[Opening, ...] = ()
    """The policy's first decisions from the first few positions; empty for a scripted player."""
    gains: tuple[Gain, ...] = ()

    @property
    def estimate(self) -> Estimate:
        return Estimate(mean=self.mean, low=self.low, high=self.high, clusters=self.source_games)

    def describe(self) -> str:
        size = f"{format_count(self.positions, 'positions')} from {format_count(self.source_games, 'source games')}"
        return f"{self.mean:+.2f} centres, {self.estimate.describe('+.2f', 'source games')}; {self.forks} forks of {size}"


async def measure_strength(
    player: str,
    opponents: str,
    positions: Sequence[Snapshot],
    settings: EvaluationSettings,
    decider: Decider | None = None,
    on_fork: OnFork = lambda done, total: None,
    temperature: float = 1.0,
) -> Score:
    """Measure `player` in one seat against `opponents` in the six others.

    Args:
        player: POLICY, whose openings the score keeps, or another name.
        decider: None: `player` is a scripted player.

    Raises:
        InputError: there are fewer held-out positions than `settings.positions`.
        EngineError: a fork failed; scores on fewer positions are not comparable.
    """
    if len(positions) < settings.positions:
        raise InputError(
            f"evaluation.positions is {settings.positions}, but the state cache holds {len(positions)} held-out positions: "
            "lower evaluation.positions or build a larger cache"
        )
    chosen = list(positions[: settings.positions])
    pairs = [(snapshot, power) for snapshot in chosen for power in _powers(snapshot)]
    players, done = {} if decider is None else {player: decider}, 0

    async def gain(snapshot: Snapshot, power: str) -> tuple[float, int, Opening | None]:
        nonlocal done
        name = f"evaluation/{SCORE_SEED}/{snapshot.snapshot_id}/{power}"
        plan = ForkPlan(
            name=name,
            shared_name=name,
            seats={seat: player if seat == power else opponents for seat in POWERS},
            horizon_years=settings.horizon_years,
            temperature=temperature,
            snapshot_id=snapshot.snapshot_id,
        )
        fork = await play_fork(plan, Board.restore(snapshot), players, record_phases=False)
        if fork.status != "complete" or fork.start is None or fork.end is None:
            raise EngineError(f"evaluation of '{player}' failed on position {snapshot.snapshot_id}: {fork.reason}")
        done += 1
        on_fork(done, len(pairs))
        seat = POWERS.index(power)
        gained = fork.end.centres[seat] - fork.start.centres[seat]
        opening = None
        if isinstance(decider, PolicyPlayer) and fork.decisions and fork.decisions[0].phase_index == 0:
            opening = _opening(snapshot, fork.decisions[0], decider.tokens)
        return gained, fork.rejected, opening

    results = await asyncio.gather(*(gain(snapshot, power) for snapshot, power in pairs))
    gains = np.array([result[0] for result in results], float)
    games = np.array([snapshot.game_id for snapshot, _ in pairs])
    gain_estimate = estimate(gains, games, SCORE_SEED)
    return Score(
        mean=gain_estimate.mean,
        low=gain_estimate.low,
        high=gain_estimate.high,
        forks=len(pairs),
        positions=len(chosen),
        source_games=gain_estimate.clusters,
        orders_rejected=sum(result[1] for result in results),
        openings=tuple(opening for _, _, opening in results if opening is not None)[:_OPENINGS_KEPT],
        gains=tuple(
            Gain(snapshot_id=snapshot.snapshot_id, game_id=snapshot.game_id, power=power, centres=float(gained))
            for (snapshot, power), gained in zip(pairs, gains.tolist(), strict=True)
        ),
    )


def _opening(snapshot: Snapshot, first: Decision, tokens: Tokens) -> Opening:
    completion, token_logprobs = first.completion_ids.tolist(), np.asarray(first.behaviour_logprobs).tolist()
    logprobs = tokens.tables.order_logprobs(completion, token_logprobs)
    return Opening(
        snapshot=snapshot,
        power=first.power,
        orders=tuple(first.orders),
        probabilities=tuple(round(math.exp(logprob), 6) for logprob in logprobs),
        thought=thought_of(
            completion, token_logprobs, np.asarray(first.legal_ids), np.asarray(first.legal_offsets), tokens.codec
        ),
    )


def _powers(snapshot: Snapshot) -> list[str]:
    powers = list(Board.restore(snapshot).legal_orders())
    generator = seeded_rng("evaluation-powers", SCORE_SEED, snapshot.snapshot_id)
    return sorted(generator.sample(powers, min(POWERS_PER_POSITION, len(powers))))


__all__ = ["POLICY", "Gain", "Opening", "Score", "measure_strength"]
