"""Rollouts in either way, one switch at a time: what is asked, in what text, of which engine, and who waits for whom.

Stands for the old system's synchronised forks: all forks of a rollout in lock-step, the prompts of a phase in one generate call,
which ends with its slowest answer; forks are never refilled, so batches shrink. As there, rollouts of a step run beside one
another, and the step waits for all of them. Opponents' dice, seeds, horizon and reward are those of `rollouts`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.old_way.engine import OldEngine, TextRequest, TimedEngine
from benchmarks.old_way.games import Start, clones, path_of, power_of, restored, warm_up_phases
from benchmarks.old_way.json_prompts import HEAD, json_prompt
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.ways import Way
from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from game.board import POWERS, Board
from game.legal import WAIVE, LegalOrders, OrderKind
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS, PromptSettings
from game.prompts import board_text, power_text, rules_text
from game.scores import Standing, compute_standing, horizon_reached
from records.generation import Generation, GenerationRequest
from rollouts.seeds import dice, seed_of


@dataclass(slots=True, kw_only=True)
class Row:
    """One decision, as either way records it."""

    group: int
    fork: int
    ply: int
    power: str
    phase: str
    prompt: str
    """Text, where the way keeps text."""
    prompt_ids: Sequence[int]
    generation: Generation
    legal_ids: np.ndarray
    legal_offsets: np.ndarray
    orders: tuple[str, ...]
    before: Standing
    after: Standing | None = None
    """How all stood when the fork ended."""
    until: Standing | None = None
    """How all stood at the fork's next decision, or at its end."""

    @property
    def reward(self) -> float:
        """Centres gained from the decision to the fork's end."""
        assert self.after is not None
        return float(self.after.centres[_seat(self.power)] - self.before.centres[_seat(self.power)])


@dataclass(slots=True)
class Counts:
    """Of one roll-out, counted at the request."""

    warm_up_decisions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    forks: int = 0
    plies: int = 0
    omitted_orders: int = 0
    """Orders wanted and not given."""


@dataclass(slots=True, kw_only=True)
class Ask:
    """One decision to be drawn."""

    name: str
    board: Board
    legal: LegalOrders
    snapshot_id: str = ""


Answer = tuple[str, Sequence[int], Generation, tuple[np.ndarray, np.ndarray], list[str]]
"""Prompt, its ids, what was drawn, what was legal at each position, the orders."""


@dataclass(kw_only=True)
class Table:
    """All that rollouts need: the way, an engine of its kind, the model's words, and a clock."""

    way: Way
    engine: TimedEngine
    codec: Codec
    clock: StageClock
    temperature: float = 1.0
    opponents: str = "random"
    record_legal: bool = True
    """Keep what was allowed at each position, where the engine is of old: it only matters to our trainer."""
    prompts: PromptSettings = DEFAULT_PROMPTS
    """How compact prompts are written; JSON is answered in full."""
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        notation = self.prompts.order_notation if self.way.compact_prompts and self.way.mask_core else "full"
        self.tables = TableBuilder(self.codec, notation)

    # -- drawing --------------------------------------------------------------------------------------------------------

    async def draw(self, asks: Sequence[Ask]) -> list["Answer"]:
        """The answer to each ask, when the last is there."""
        drawn = await (self._by_table(asks) if self.way.mask_core else self._by_call(asks))
        for _, prompt_ids, generation, _, _ in drawn:
            self.counts.prompt_tokens += len(prompt_ids)
            self.counts.completion_tokens += len(generation.token_ids)
        return drawn

    async def _by_table(self, asks: Sequence[Ask]) -> list[Any]:
        requests, prompts = [], []
        for ask in asks:
            with self.clock("prompts"):
                segments = self._segments(ask)
                prompts.append("".join(segments) if not self.way.kept_tokens else "")
                ids = self.codec.encode_prompt(segments)
            with self.clock("mask"):
                table = self.tables.table(ask.legal)
            requests.append(
                GenerationRequest(
                    request_id=ask.name,
                    prompt_ids=ids,
                    table=table,
                    seed=seed_of(ask.name),
                    temperature=self.temperature,
                    snapshot_id=ask.snapshot_id,
                )
            )
        drawn = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        found = []
        with self.clock("parse"):
            for ask, prompt, request, generation in zip(asks, prompts, requests, drawn, strict=True):
                completion = generation.token_ids.tolist()
                orders = self.tables.read(completion, ask.legal)
                found.append((prompt, request.prompt_ids, generation, request.table.legal_sets(completion), orders))
        return found

    async def _by_call(self, asks: Sequence[Ask]) -> list[Any]:
        assert isinstance(self.engine, OldEngine)
        requests = []
        for ask in asks:
            with self.clock("prompts"):
                prompt, moves = "".join(self._segments(ask)), _valid_moves(ask.legal)
            requests.append(
                TextRequest(
                    request_id=ask.name,
                    prompt=prompt,
                    valid_moves=moves,
                    wanted=ask.legal.picks,
                    seed=seed_of(ask.name),
                    temperature=self.temperature,
                )
            )
        answers = await self.engine.generate_call(requests, record=self.record_legal)
        found = []
        with self.clock("parse"):
            for ask, request, (ids, generation, allowed) in zip(asks, requests, answers, strict=True):
                text = self.codec.decode(token for token in generation.token_ids if token != self.codec.eos_id)
                orders = [line.strip() for line in text.split("\n") if line.strip()][: ask.legal.picks]
                self.counts.omitted_orders += ask.legal.picks - len(orders)
                found.append((request.prompt, ids, generation, _as_sets(allowed, generation), orders))
        return found

    def _segments(self, ask: Ask) -> tuple[str, ...]:
        if self.way.compact_prompts:
            return rules_text(self.prompts), board_text(ask.board), power_text(ask.legal, ask.board, self.prompts)
        return HEAD, json_prompt(ask.board, ask.legal)

    # -- playing --------------------------------------------------------------------------------------------------------

    async def roll_out(self, start: Start, *, seed: int, forks: int, years: int) -> list[Row]:
        """One start group: warm-up or restored position, clones, forks to the horizon, rewards."""
        shared = f"{seed}/{start.number}"
        board = restored(self.way, start, self.clock) if self.way.snapshots else await self._warmed_up(start, shared, seed)
        power = power_of(board, start, self.clock)
        lives = [
            _Fork(number=number, board=twin, shared=shared, power=power, group=start.number, start=board.phase, years=years)
            for number, twin in enumerate(clones(self.way, board, forks, self.clock))
        ]
        self.counts.forks += forks
        if self.way.in_flight:
            await asyncio.gather(*(self._play_alone(life, start) for life in lives))
        else:
            await self._play_together(lives, start)
        return [row for life in lives for row in life.ended()]

    async def _play_alone(self, life: "_Fork", start: Start) -> None:
        while not life.is_over(self.clock):
            await self._ply([life], start)

    async def _play_together(self, lives: Sequence["_Fork"], start: Start) -> None:
        while live := [life for life in lives if not life.is_over(self.clock)]:
            await self._ply(live, start)

    async def _ply(self, lives: Sequence["_Fork"], start: Start) -> None:
        """One phase of these forks; none goes on before the last answer is there."""
        asks, askers = [], []
        for life in lives:
            with self.clock("games"):
                choice = life.board.legal_orders().get(life.power)
            if choice is not None and not choice.is_forced:
                name = f"{life.shared}/{life.number}/{life.ply}/{life.power}"
                asks.append(Ask(name=name, board=life.board, legal=choice, snapshot_id=start.snapshot.snapshot_id))
                askers.append(life)
        answers = dict(zip((id(life) for life in askers), await self.draw(asks), strict=True)) if asks else {}
        for life in lives:
            answer = answers.get(id(life))
            with self.clock("games"):
                life.step(answer, self.opponents)
            self.counts.plies += 1

    async def _warmed_up(self, start: Start, shared: str, seed: int) -> Board:
        """A game from spring 1901 whose first phases are played for this rollout alone; nothing of them is kept."""
        with self.clock("clone"):
            board = Board.start(path=path_of(self.way))
        for phase in range(warm_up_phases(seed, start.number)):
            with self.clock("games"):
                legal = board.legal_orders()
            asked = [
                power
                for power, choice in legal.items()
                if (self.way.warm_up_all or power == start.power) and not choice.is_forced
            ]
            asks = [Ask(name=f"{shared}/warm/{phase}/{power}", board=board, legal=legal[power]) for power in asked]
            drawn = await self.draw(asks) if asks else []
            self.counts.warm_up_decisions += len(asks)
            with self.clock("games"):
                orders = _scripted(board, shared, self.opponents, skip=asked)
                board.step(orders | {power: answer[4] for power, answer in zip(asked, drawn, strict=True)})
        return board


@dataclass(slots=True, kw_only=True)
class _Fork:
    number: int
    board: Board
    shared: str
    power: str
    group: int
    start: str
    years: int
    ply: int = 0
    rows: list[Row] = field(default_factory=list)
    now: Standing | None = None

    def is_over(self, clock: StageClock) -> bool:
        with clock("games"):
            if self.now is None:
                self.now = compute_standing(self.board)
            return self.board.is_over or (
                self.ply > 0
                and (horizon_reached(self.start, self.board.phase, self.years) or not self.board.is_alive(self.power))
            )

    def step(self, answer: Any, opponents: str) -> None:
        phase, before = self.board.phase, self.now
        assert before is not None
        orders = _scripted(self.board, self.shared, opponents, skip=[self.power] if answer else [])
        if answer:
            prompt, prompt_ids, generation, legal_sets, given = answer
            orders[self.power] = given
            self.rows.append(
                Row(
                    group=self.group,
                    fork=self.number,
                    ply=self.ply,
                    power=self.power,
                    phase=phase,
                    prompt=prompt,
                    prompt_ids=prompt_ids,
                    generation=generation,
                    legal_ids=legal_sets[0],
                    legal_offsets=legal_sets[1],
                    orders=tuple(given),
                    before=before,
                )
            )
        played = self.board.step(orders)
        self.now = compute_standing(self.board, before, played)
        self.ply += 1

    def ended(self) -> list[Row]:
        following = self.now
        for row in reversed(self.rows):
            row.after, row.until, following = self.now, following, row.before
        return self.rows


def _scripted(board: Board, shared: str, opponents: str, skip: Sequence[str]) -> dict[str, list[str]]:
    """Orders of all others; dice by group, phase and power, so that forks share them."""
    return {
        power: player(opponents)(choice, dice(shared, board.phase, power), board)
        for power, choice in board.legal_orders().items()
        if power not in skip
    }


def _valid_moves(legal: LegalOrders) -> dict[str, list[str]]:
    """Legal orders by unit; a build may be waived, as often as builds are owed."""
    moves = {site: list(options) for site, options in zip(legal.sites, legal.options, strict=True)}
    if legal.kind is OrderKind.BUILD:
        moves |= {f"waive {number}": [WAIVE] for number in range(legal.picks)}
    return moves


def _as_sets(allowed: list[list[int]] | None, generation: Generation) -> tuple[np.ndarray, np.ndarray]:
    """Legal sets as rows hold them; without a record each position allowed what was drawn."""
    length = len(generation.token_ids)
    sets = allowed[:length] if allowed is not None else []
    sets += [[int(token)] for token in generation.token_ids[len(sets) :]]
    offsets = np.zeros(length + 1, np.int32)
    np.cumsum([len(each) for each in sets], out=offsets[1:])
    return np.array([token for each in sets for token in each], np.int32), offsets


def _seat(power: str) -> int:
    return POWERS.index(power)
