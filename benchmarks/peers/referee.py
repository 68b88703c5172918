"""Rewards of completions that a trainer without a legal mask wrote, as `integrations.questions` plays them, and their counts.

The reward is the number of centres gained, as in the laptop preset.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from game.board import Board
from integrations.questions import Question, check_opponents, read_orders, score_orders
from rollouts.settings import RolloutSettings


@dataclass(slots=True, kw_only=True)
class Referee:
    """Plays completions against the run's opponents, and counts them.

    Raises:
        InputError: an opponent is no scripted player; the referee has no engine for versions of a run.
    """

    questions: Sequence[Question]
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
        check_opponents(self.rollouts)

    def reply(self, question: dict) -> dict[str, object]:
        """Rewards of the completions `texts` of the questions `numbers`, and the CPU seconds of playing them."""
        began = time.process_time()
        rewards = asyncio.run(self._play(question["numbers"], question["texts"]))
        groups: dict[int, list[float]] = {}
        for number, reward in zip(question["numbers"], rewards, strict=True):
            groups.setdefault(number, []).append(reward)
        self.with_spread += sum(len(own) for own in groups.values() if len(set(own)) > 1)
        self.calls += 1
        return {"rewards": rewards, "cpu_s": time.process_time() - began}

    async def _play(self, numbers: Sequence[int], texts: Sequence[str]) -> list[float]:
        boards = {number: Board.restore(self.questions[number].snapshot) for number in set(numbers)}
        return await asyncio.gather(
            *(
                self._reward(place, self.questions[number], boards[number].fork(), text)
                for place, (number, text) in enumerate(zip(numbers, texts, strict=True))
            )
        )

    async def _reward(self, place: int, question: Question, board: Board, text: str) -> float:
        orders, ordered = read_orders(text, question.legal)
        self.played, self.legal = self.played + 1, self.legal + (ordered == len(orders))
        self.units, self.ordered = self.units + len(orders), self.ordered + ordered
        # Forks of a position share their luck, as in a run.
        shared = f"peer/{self.calls}/{question.snapshot.snapshot_id}"
        found = await score_orders(question, orders, self.rollouts, shared=shared, name=str(place), board=board)
        return found["centres_gained"]
