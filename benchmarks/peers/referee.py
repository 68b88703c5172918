"""Rewards of completions that a trainer without a legal mask wrote: they are read as orders and played to the horizon.

A unit takes the first line that is a legal order of its own; a unit without one holds, as the rules of Diplomacy say. Later
decisions of the power in the fork are drawn by the scripted player `random`, because such a trainer asks its model once a sample.
The reward is the number of centres gained, as in the laptop preset.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from game.board import POWERS, Board
from game.legal import LegalOrders, OrderKind
from game.players import player
from game.snapshot import Snapshot
from rollouts.deciders import DecisionRequest, Tokens
from rollouts.fork import ForkPlan, play_fork
from rollouts.opponents import draw_opponents
from rollouts.seeds import dice
from rollouts.settings import RolloutSettings
from state_cache.sampling import sample_start_positions
from telemetry.errors import EngineError, InputError

_SEAT = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A position and a power that decides there."""

    text: str
    snapshot: Snapshot
    power: str
    legal: LegalOrders
    longest: int
    """Tokens of the longest legal completion."""


def prompts_of(positions: Sequence[Snapshot], tokens: Tokens, *, seed: int) -> list[Prompt]:
    """One prompt for each position at which a power, drawn as in a run, moves and has a choice.

    Raises:
        InputError: the tokenizer does not spell the text of a prompt as the prompt, so a peer would train on another one.
    """
    found = []
    for snapshot, power in sample_start_positions(positions, len(positions), seed, 0):
        board = Board.restore(snapshot)
        legal = board.legal_orders().get(power)
        if legal is None or legal.is_forced or legal.kind is not OrderKind.MOVEMENT:
            continue
        ids = tokens.prompt_ids(board, legal)
        text = tokens.codec.decode(ids)
        if tokens.codec.encode(text) != tuple(ids):
            raise InputError("the prompt's text has other token ids than the prompt: measure with the model of the laptop preset")
        longest = tokens.tables.table(legal).longest
        found.append(Prompt(text=text, snapshot=snapshot, power=power, legal=legal, longest=longest))
    return found


def orders_of(text: str, legal: LegalOrders) -> tuple[list[str], int]:
    """The orders that a completion spells in full notation, in the order of the sites, and the number of units that it orders.

    A unit takes the first line that is one of its legal orders, at any place of the answer; without one it holds.
    """
    lines = text.split("\n")
    ordered = [next((line for line in lines if line in options), None) for options in legal.options]
    orders = [line or f"{site} H" for line, site in zip(ordered, legal.sites, strict=True)]
    return orders, len(orders) - ordered.count(None)


@dataclass(slots=True, kw_only=True)
class Referee:
    """Plays completions against the run's opponents, and counts them.

    Raises:
        InputError: an opponent is no scripted player; the referee has no engine for versions of a run.
    """

    prompts: Sequence[Prompt]
    rollouts: RolloutSettings
    calls: int = 0
    played: int = 0
    legal: int = 0
    """Completions with a legal order for every unit."""
    units: int = 0
    """Units of the powers in all completions."""
    ordered: int = 0
    """Those of them that got a legal order."""
    with_spread: int = 0
    """Completions of groups whose rewards differ."""

    def __post_init__(self) -> None:
        table = self.rollouts.opponent_table
        if engines := [name for name, _ in table if name not in self.rollouts.scripted_opponents]:
            raise InputError(f"a peer's games have scripted opponents only, not {', '.join(engines)}: change rollouts.opponents")

    def reply(self, question: dict) -> dict[str, object]:
        """Rewards of the completions `texts` of the prompts `numbers`, and the CPU seconds of playing them."""
        began = time.process_time()
        rewards = asyncio.run(self._play(question["numbers"], question["texts"]))
        groups: dict[int, list[float]] = {}
        for number, reward in zip(question["numbers"], rewards, strict=True):
            groups.setdefault(number, []).append(reward)
        self.with_spread += sum(len(own) for own in groups.values() if len(set(own)) > 1)
        self.calls += 1
        return {"rewards": rewards, "cpu_s": time.process_time() - began}

    async def _play(self, numbers: Sequence[int], texts: Sequence[str]) -> list[float]:
        boards = {number: Board.restore(self.prompts[number].snapshot, self.rollouts.board_path) for number in set(numbers)}
        return await asyncio.gather(
            *(
                self._reward(place, self.prompts[number], boards[number].fork(), text)
                for place, (number, text) in enumerate(zip(numbers, texts, strict=True))
            )
        )

    async def _reward(self, place: int, prompt: Prompt, board: Board, text: str) -> float:
        orders, ordered = orders_of(text, prompt.legal)
        self.played, self.legal = self.played + 1, self.legal + (ordered == len(orders))
        self.units, self.ordered = self.units + len(orders), self.ordered + ordered
        # Forks of a position share their luck, as in a run.
        shared = f"peer/{self.calls}/{prompt.snapshot.snapshot_id}"
        others = [power for power in POWERS if power != prompt.power]
        plan = ForkPlan(
            name=f"{shared}/{place}",
            shared_name=shared,
            seats={prompt.power: _SEAT}
            | draw_opponents(shared, self.rollouts.opponent_table, others, by_seat=self.rollouts.opponents_by == "seat"),
            horizon_years=self.rollouts.horizon_years,
            settled_years=self.rollouts.settled_years,
            last_winter=self.rollouts.last_winter,
            temperature=1.0,
            snapshot_id=prompt.snapshot.snapshot_id,
        )
        fork = await play_fork(plan, board, None, None, deciders={_SEAT: _FirstOrders(orders, shared)}, record_plies=False)
        if fork.start is None or fork.end is None or fork.status != "complete":
            raise EngineError(f"a fork of the referee failed: {fork.reason}")
        seat = POWERS.index(prompt.power)
        return float(fork.end.centres[seat] - fork.start.centres[seat])


@dataclass(frozen=True, slots=True)
class _FirstOrders:
    """Gives these orders first, then those of the player `random`."""

    orders: list[str]
    shared: str

    async def decide(self, request: DecisionRequest) -> list[str]:
        if request.ply == 0:
            return self.orders
        return player("random")(request.legal, dice(self.shared, request.board.phase, request.power), request.board)
