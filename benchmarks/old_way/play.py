"""Rollouts of either way: the requests, their prompts, the engine, and the order in which forks wait.

As the old system's synchronised forks: all forks of a rollout advance in lock-step, with the prompts of a phase in one generate
call that ends with its slowest completion. Forks that end are not replaced, so batches shrink. The rollouts of a step run at the
same time, and the step waits for all. Opponents' random numbers, seeds, the policy's powers, the ends of forks and the reward are
those of `rollouts`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from benchmarks.old_way.engine import OldEngine, TextRequest, TimedEngine
from benchmarks.old_way.games import Start, clones, path_of, powers_of, restored, warm_up_phases
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
    """One decision, as recorded by both ways."""

    group: int
    fork: int
    ply: int
    power: str
    phase: str
    prompt: str
    """The text, if the way keeps text."""
    prompt_ids: Sequence[int]
    generation: Generation
    legal_ids: np.ndarray
    legal_offsets: np.ndarray
    orders: tuple[str, ...]
    before: Standing
    after: Standing | None = None
    """Standing at the end of the fork."""
    until: Standing | None = None
    """Standing at the next decision of its power in the fork, or at the fork's end."""

    @property
    def reward(self) -> float:
        """Centres gained from the decision to the fork's end."""
        assert self.after is not None
        seat = POWERS.index(self.power)
        return float(self.after.centres[seat] - self.before.centres[seat])


@dataclass(slots=True)
class Counts:
    """Work of the rollouts so far."""

    warm_up_decisions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    forks: int = 0


@dataclass(slots=True, kw_only=True)
class Ask:
    """One decision to draw."""

    name: str
    board: Board
    legal: LegalOrders
    snapshot_id: str = ""


@dataclass(slots=True, kw_only=True)
class Answer:
    """One drawn decision."""

    prompt: str
    """The text, if the way keeps text."""
    prompt_ids: Sequence[int]
    generation: Generation
    legal_sets: tuple[np.ndarray, np.ndarray]
    """Legal ids of all positions, and the offset of each position."""
    orders: list[str]


@dataclass(kw_only=True)
class Table:
    """Plays the rollouts of one way."""

    way: Way
    engine: TimedEngine
    codec: Codec
    clock: StageClock
    temperature: float = 1.0
    opponents: str = "random"
    record_legal: bool = True
    """The old engine records the legal sets, which only our trainer needs."""
    prompts: PromptSettings = DEFAULT_PROMPTS
    """Form of compact prompts; JSON prompts are completed in full notation."""
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        notation = self.prompts.order_notation if self.way.compact_prompts and self.way.mask_core else "full"
        self.tables = TableBuilder(self.codec, notation)
        self._encode = lru_cache(maxsize=1024)(self.codec.encode)

    # -- drawing --------------------------------------------------------------------------------------------------------

    async def draw(self, asks: Sequence[Ask]) -> list[Answer]:
        """Draw all decisions; returns when the last one is drawn."""
        drawn = await (self._by_table(asks) if self.way.mask_core else self._by_call(asks))
        self.counts.prompt_tokens += sum(len(answer.prompt_ids) for answer in drawn)
        self.counts.completion_tokens += sum(len(answer.generation.token_ids) for answer in drawn)
        return drawn

    async def _by_table(self, asks: Sequence[Ask]) -> list[Answer]:
        requests, prompts = [], []
        for ask in asks:
            with self.clock("prompts"):
                segments = self._segments(ask)
                prompts.append("".join(segments) if not self.way.kept_tokens else "")
                ids = [token for segment in segments for token in self._encode(segment)]
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
        with self.clock("parse"):
            return [
                Answer(
                    prompt=prompt,
                    prompt_ids=request.prompt_ids,
                    generation=generation,
                    legal_sets=request.table.legal_sets(completion := generation.token_ids.tolist()),
                    orders=self.tables.read(completion, ask.legal),
                )
                for ask, prompt, request, generation in zip(asks, prompts, requests, drawn, strict=True)
            ]

    async def _by_call(self, asks: Sequence[Ask]) -> list[Answer]:
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
                sets = _as_sets(allowed, generation)
                found.append(Answer(prompt=request.prompt, prompt_ids=ids, generation=generation, legal_sets=sets, orders=orders))
        return found

    def _segments(self, ask: Ask) -> tuple[str, ...]:
        if self.way.compact_prompts:
            return (
                rules_text(self.prompts),
                board_text(ask.board, ask.legal.power, self.prompts),
                power_text(ask.legal, ask.board, self.prompts),
            )
        return HEAD, json_prompt(ask.board, ask.legal)

    # -- playing --------------------------------------------------------------------------------------------------------

    async def roll_out(self, start: Start, *, seed: int, forks: int, years: int, settled_years: int = 0) -> list[Row]:
        """One start group: warm-up or restored position, clones, forks to the horizon, rewards.

        Args:
            years: game years of a fork.
            settled_years: game years without a change of centres after which a fork ends; 0: no such end.
        """
        shared = f"{seed}/{start.number}"
        board = restored(self.way, start, self.clock) if self.way.snapshots else await self._warmed_up(start, shared, seed)
        powers, begun = powers_of(board, start, self.clock), board.phase
        playing = [
            _Fork(
                number=number,
                board=twin,
                shared=shared,
                powers=powers,
                group=start.number,
                start=begun,
                years=years,
                settled_years=settled_years,
                changed=begun,
            )
            for number, twin in enumerate(clones(self.way, board, forks, self.clock))
        ]
        self.counts.forks += forks
        if self.way.in_flight:
            await asyncio.gather(*(self._play([fork], start) for fork in playing))
        else:
            await self._play(playing, start)
        return [row for fork in playing for row in fork.finished_rows()]

    async def _play(self, forks: Sequence["_Fork"], start: Start) -> None:
        """Play these forks in lock-step to their ends."""
        while live := [fork for fork in forks if not fork.is_over(self.clock)]:
            asks: dict[tuple[int, str], Ask] = {}
            for fork in live:
                with self.clock("games"):
                    legal = fork.board.legal_orders()
                for power in fork.powers:
                    if power in legal and not legal[power].is_forced:
                        name = f"{fork.shared}/{fork.number}/{fork.ply}/{power}"
                        ask = Ask(name=name, board=fork.board, legal=legal[power], snapshot_id=start.snapshot.snapshot_id)
                        asks[fork.number, power] = ask
            answers = dict(zip(asks, await self.draw(list(asks.values())), strict=True)) if asks else {}
            for fork in live:
                own = {power: answer for (number, power), answer in answers.items() if number == fork.number}
                with self.clock("games"):
                    fork.step(own, self.opponents)

    async def _warmed_up(self, start: Start, shared: str, seed: int) -> Board:
        """A game from spring 1901 after its warm-up, which is played for this rollout only and keeps no rows."""
        with self.clock("clone"):
            board = Board.start(path=path_of(self.way))
        for phase in range(warm_up_phases(seed, start.number)):
            with self.clock("games"):
                legal = board.legal_orders()
            asked = [
                power
                for power, choice in legal.items()
                if (self.way.warm_up_all or start.power in (None, power)) and not choice.is_forced
            ]
            asks = [Ask(name=f"{shared}/warm/{phase}/{power}", board=board, legal=legal[power]) for power in asked]
            drawn = await self.draw(asks) if asks else []
            self.counts.warm_up_decisions += len(asks)
            with self.clock("games"):
                orders = _scripted(board, shared, self.opponents, skip=asked)
                board.step(orders | {power: answer.orders for power, answer in zip(asked, drawn, strict=True)})
        return board


@dataclass(slots=True, kw_only=True)
class _Fork:
    number: int
    board: Board
    shared: str
    powers: Sequence[str]
    """Those that the policy plays."""
    group: int
    start: str
    years: int
    settled_years: int
    changed: str
    """Phase in which centres were last seen to change; at first the fork's first phase."""
    centres: object = None
    ply: int = 0
    rows: list[Row] = field(default_factory=list)
    now: Standing | None = None

    def is_over(self, clock: StageClock) -> bool:
        with clock("games"):
            if self.now is None:
                self.now, self.centres = compute_standing(self.board), self.board.centres()
            return self.board.is_over or (
                self.ply > 0
                and (
                    horizon_reached(self.start, self.board.phase, self.years)
                    or not any(self.board.is_alive(power) for power in self.powers)
                    or self._is_settled()
                )
            )

    def _is_settled(self) -> bool:
        if not 0 < self.settled_years < self.years:  # the horizon comes first
            return False
        if (centres := self.board.centres()) != self.centres:
            self.centres, self.changed = centres, self.board.phase
            return False
        return horizon_reached(self.changed, self.board.phase, self.settled_years)

    def step(self, answers: Mapping[str, Answer], opponents: str) -> None:
        """Play a phase; `answers` by power."""
        phase, before = self.board.phase, self.now
        assert before is not None
        orders = _scripted(self.board, self.shared, opponents, skip=list(answers))
        for power, answer in answers.items():
            orders[power] = answer.orders
            self.rows.append(
                Row(
                    group=self.group,
                    fork=self.number,
                    ply=self.ply,
                    power=power,
                    phase=phase,
                    prompt=answer.prompt,
                    prompt_ids=answer.prompt_ids,
                    generation=answer.generation,
                    legal_ids=answer.legal_sets[0],
                    legal_offsets=answer.legal_sets[1],
                    orders=tuple(answer.orders),
                    before=before,
                )
            )
        played = self.board.step(orders)
        self.now = compute_standing(self.board, before, played)
        self.ply += 1

    def finished_rows(self) -> list[Row]:
        """The rows, with the standings at the next decision of their power and at the end."""
        following = dict.fromkeys(self.powers, self.now)
        for row in reversed(self.rows):
            row.after, row.until, following[row.power] = self.now, following[row.power], row.before
        return self.rows


def _scripted(board: Board, shared: str, opponents: str, skip: Sequence[str]) -> dict[str, list[str]]:
    """Orders of the other powers; random numbers follow from group, phase and power, so forks share them."""
    return {
        power: player(opponents)(choice, dice(shared, board.phase, power), board)
        for power, choice in board.legal_orders().items()
        if power not in skip
    }


def _valid_moves(legal: LegalOrders) -> dict[str, list[str]]:
    """Legal orders by unit; every build that is owed may be waived."""
    moves = {site: list(options) for site, options in zip(legal.sites, legal.options, strict=True)}
    if legal.kind is OrderKind.BUILD:
        moves |= {f"waive {number}": [WAIVE] for number in range(legal.picks)}
    return moves


def _as_sets(allowed: list[list[int]] | None, generation: Generation) -> tuple[np.ndarray, np.ndarray]:
    """Legal sets in the form of rows; without a record each set holds the drawn token only."""
    length = len(generation.token_ids)
    sets = allowed[:length] if allowed is not None else []
    sets += [[int(token)] for token in generation.token_ids[len(sets) :]]
    offsets = np.zeros(length + 1, np.int32)
    np.cumsum([len(each) for each in sets], out=offsets[1:])
    return np.array([token for each in sets for token in each], np.int32), offsets
