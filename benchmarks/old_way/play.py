"""Rollouts of the old way, and their files.

As the old system's synchronised forks: 20 % of the rollouts start from spring 1901, the others first play up to eight phases by
inference, for which the model plays every power, and keep no rows of them. The game object is then pickled once and loaded for
every fork (1.0 MB, about 100 ms a load). All forks of a rollout advance in lock-step, with the prompts of a phase in one generate
call that ends with its slowest completion. Forks that end are not replaced, so batches shrink. The rollouts of a step run at the
same time, and the step waits for all. Rows are one indented JSON file for each rollout, with texts instead of token ids.
Opponents' random numbers, seeds, the policy's powers, the horizon and the reward are those of `rollouts`.
Cheaper than the original: no phase times out, and a power without units before the fork is not chosen.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.old_way.engine import OldEngine
from benchmarks.old_way.prompts import HEAD, json_prompt
from decoding.codec import Codec
from game.board import POWERS, Board, BoardPath
from game.legal import WAIVE, LegalOrders, OrderKind
from game.players import player
from game.scores import Standing, compute_standing, horizon_reached
from game.snapshot import Snapshot
from records.generation import Generation
from rollouts.seeds import dice, seed_of
from rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions

WARM_UP_PHASES, NO_WARM_UP = 8, 0.2
"""Largest number of phases of a warm-up, and the share of rollouts without one."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One decision."""

    group: int
    fork: int
    ply: int
    power: str
    phase: str
    prompt: str
    generation: Generation
    orders: list[str]
    before: Standing
    after: Standing | None = None
    """Standing at the end of the fork."""

    @property
    def reward(self) -> float:
        """Centres gained from the decision to the fork's end."""
        assert self.after is not None
        seat = POWERS.index(self.power)
        return float(self.after.centres[seat] - self.before.centres[seat])


def ask(name: str, board: Board, legal: LegalOrders, temperature: float) -> dict[str, Any]:
    """One decision of a generate call; every build that is owed may be waived."""
    moves = {site: list(options) for site, options in zip(legal.sites, legal.options, strict=True)}
    if legal.kind is OrderKind.BUILD:
        moves |= {f"waive {number}": [WAIVE] for number in range(legal.picks)}
    prompt = HEAD + json_prompt(board, legal)
    return {
        "name": name,
        "prompt": prompt,
        "valid_moves": moves,
        "wanted": legal.picks,
        "seed": seed_of(name),
        "temperature": temperature,
    }


class OldRollouts:
    """Plays the rollouts of the old way's steps."""

    def __init__(
        self, model: Path, engine: OldEngine, rollouts: RolloutSettings, positions: Sequence[Snapshot], seed: int, folder: Path
    ) -> None:
        """`positions`: frozen ones, of which only the policy's powers are taken; `folder` gets the rows."""
        self._engine, self._rollouts, self._positions, self._seed = engine, rollouts, positions, seed
        self._codec, self._folder = Codec(model), folder
        self.counts: Counter[str] = Counter()
        """Warm-up decisions, prompt and completion tokens, and forks since the last `clear`."""

    async def draw(self, asks: Sequence[dict[str, Any]]) -> list[tuple[Generation, list[str]]]:
        """Draw all decisions in one call; returns generations and orders when the last one is drawn."""
        found = []
        for asked, (ids, generation) in zip(asks, await self._engine.generate_call(asks), strict=True):
            self.counts.update(prompt_tokens=len(ids), completion_tokens=len(generation.token_ids))
            lines = [line.strip() for line in self._text(generation).split("\n")]
            found.append((generation, [line for line in lines if line][: asked["wanted"]]))
        return found

    async def roll_out(self, step: int) -> list[Row]:
        """All rollouts of a step, from 1, at the same time; returns when the slowest is done."""
        many, first = self._rollouts.start_groups, (step - 1) * self._rollouts.start_groups
        drawn = sample_start_positions(self._positions, many, self._seed, step, sampling="uniform")
        one = self._rollouts.policy_powers == "one"
        played = (self._group(first + place, power if one else None) for place, (_, power) in enumerate(drawn))
        return [row for rows in await asyncio.gather(*played) for row in rows]

    def write(self, step: int, rows: Sequence[Row]) -> Path:
        """Write the rows of a step, as texts; returns their folder."""
        target = self._folder / f"step-{step:05d}"
        target.mkdir(parents=True, exist_ok=True)
        for group in sorted({row.group for row in rows}):
            records = [self._record(row) for row in rows if row.group == group]
            (target / f"rollout-{group:06d}.json").write_text(json.dumps(records, indent=2))
        return target

    def _record(self, row: Row) -> dict[str, Any]:
        return {
            "game_id": f"game_{row.group:06d}",
            "group_id": f"game_{row.group:06d}_{row.power}_step{row.ply}",
            "fork": row.fork,
            "power": row.power,
            "phase": row.phase,
            "orders": row.orders,
            "reward": row.reward,
            "completion_logprobs": [float(value) for value in row.generation.logprobs],
            "prompt": row.prompt,
            "completion": self._text(row.generation),
        }

    def _text(self, generation: Generation) -> str:
        return self._codec.decode(token for token in generation.token_ids.tolist() if token != self._codec.eos_id)

    async def _group(self, number: int, power: str | None) -> list[Row]:
        """One rollout: warm-up, clones, forks to the horizon, rewards."""
        shared, many = f"{self._seed}/{number}", self._rollouts.forks_per_group
        board = await self._warmed_up(number, shared)
        powers, begun = powers_of(board, number, power), board.phase
        forks = [
            Fork(number=n, board=twin, group=number, start=begun, now=compute_standing(twin))
            for n, twin in enumerate(clones(board, many))
        ]
        self.counts["forks"] += many
        while live := [fork for fork in forks if not fork.is_over(powers, self._rollouts.horizon_years)]:
            asks: dict[tuple[int, str], dict[str, Any]] = {}
            for fork in live:
                for own, legal in fork.board.legal_orders().items():
                    if own in powers and not legal.is_forced:
                        name = f"{shared}/{fork.number}/{fork.ply}/{own}"
                        asks[fork.number, own] = ask(name, fork.board, legal, self._rollouts.temperature)
            drawn = dict(zip(asks, await self.draw(list(asks.values())), strict=True)) if asks else {}
            for fork in live:
                own = {power: (asks[n, power]["prompt"], *answer) for (n, power), answer in drawn.items() if n == fork.number}
                fork.step(own, scripted(fork.board, shared, self._rollouts.opponents, skip=list(own)))
        return [row for fork in forks for row in fork.finished_rows()]

    async def _warmed_up(self, number: int, shared: str) -> Board:
        """A game from spring 1901 after its warm-up, which is played for this rollout only and keeps no rows."""
        board = Board.start(path=BoardPath.PLAIN)
        for phase in range(warm_up_phases(self._seed, number)):
            asked = {power: legal for power, legal in board.legal_orders().items() if not legal.is_forced}
            asks = [ask(f"{shared}/warm/{phase}/{p}", board, legal, self._rollouts.temperature) for p, legal in asked.items()]
            drawn = await self.draw(asks) if asks else []
            self.counts["warm_up_decisions"] += len(asks)
            orders = scripted(board, shared, self._rollouts.opponents, skip=list(asked))
            board.step(orders | {power: given for power, (_, given) in zip(asked, drawn, strict=True)})
        return board


@dataclass(slots=True, kw_only=True)
class Fork:
    """One continuation of a warmed-up game."""

    number: int
    board: Board
    group: int
    start: str
    """First phase."""
    now: Standing
    ply: int = 0
    rows: list[Row] = field(default_factory=list)

    def is_over(self, powers: Sequence[str], horizon_years: int) -> bool:
        """Whether the game, the horizon or the policy's `powers` have ended."""
        if not self.ply or self.board.is_over:
            return self.board.is_over
        beyond = horizon_reached(self.start, self.board.phase, horizon_years)
        return beyond or not any(self.board.is_alive(power) for power in powers)

    def step(self, answers: Mapping[str, tuple[str, Generation, list[str]]], others: dict[str, list[str]]) -> None:
        """Play a phase: prompt, generation and orders of the policy's powers, and the orders of the others."""
        for power, (prompt, generation, orders) in answers.items():
            row = Row(group=self.group, fork=self.number, ply=self.ply, power=power, phase=self.board.phase, prompt=prompt,
                      generation=generation, orders=orders, before=self.now)  # fmt: skip
            self.rows.append(row)
        played = self.board.step(others | {power: orders for power, (_, _, orders) in answers.items()})
        self.now = compute_standing(self.board, self.now, played)
        self.ply += 1

    def finished_rows(self) -> list[Row]:
        """The rows, with the standing at the end."""
        for row in self.rows:
            row.after = self.now
        return self.rows


def warm_up_phases(seed: int, number: int) -> int:
    """Number of phases that the warm-up of a start group plays."""
    chance = random.Random(f"warm-up {seed} {number}")
    return 0 if chance.random() < NO_WARM_UP else chance.randint(0, WARM_UP_PHASES)


def clones(board: Board, forks: int) -> list[Board]:
    """Independent copies of `board`."""
    import cloudpickle  # comes with Prefect; plain pickle does not accept the classes in a game

    blob = cloudpickle.dumps(board._game)  # the old system pickled the whole game, so this needs the private attribute
    return [Board(cloudpickle.loads(blob)) for _ in range(forks)]


def powers_of(board: Board, number: int, power: str | None) -> tuple[str, ...]:
    """The policy's powers: all without `power`; another one if `power` has no units after the warm-up."""
    if power is None:
        return POWERS
    able = sorted(board.legal_orders())
    if not able or (power in able and board.is_alive(power)):
        return (power,)
    return (able[number % len(able)],)


def scripted(board: Board, shared: str, opponents: str, skip: Sequence[str]) -> dict[str, list[str]]:
    """Orders of the other powers; random numbers follow from group, phase and power, so forks share them."""
    return {
        power: player(opponents)(choice, dice(shared, board.phase, power), board)
        for power, choice in board.legal_orders().items()
        if power not in skip
    }
