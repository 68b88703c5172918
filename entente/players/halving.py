"""Sequential halving: divides a budget of playouts among arms, so that the better arms get more of them.

    rounds    R = ceil(log2 n) for n arms and T playouts
    round r   each arm left gets max(1, floor(T / (arms left * R))) playouts; then the better half stays, rounded up
    best      the arm with the largest mean of those in the last round, which have equal numbers of playouts

Source: Karnin, Koren & Somekh 2013, "Almost optimal exploration in multi-armed bandits", algorithm 1. Ours keeps the values of
earlier rounds, and the last round gets what is left of the budget. Dice are paired: playout k of every arm has dice number k, so
arms of one round are compared under equal luck.

This module is pure: it knows neither boards nor players.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Pull = tuple[int, int]
"""One playout that is asked for: index of the arm, dice number from 0."""
PlayRound = Callable[[Sequence[Pull]], Awaitable[Sequence[float]]]
"""Plays the pulls of one round; returns their values in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halved:
    """What sequential halving found."""

    values: tuple[float, ...]
    """Mean value of each arm over its playouts. Only arms with equal visits met the same dice."""
    visits: tuple[int, ...]
    """Playouts of each arm; they add up to the budget at most."""
    best: int
    """Index of the best arm; in a tie the first of them."""


async def halve(arms: int, budget: int, play_round: PlayRound) -> Halved:
    """Find the best of `arms` arms with at most `budget` playouts; `budget` is at least `arms`."""
    assert 1 <= arms <= budget, "each arm needs a playout"
    found: list[list[float]] = [[] for _ in range(arms)]
    left, rounds = list(range(arms)), max(1, (arms - 1).bit_length())
    remaining = budget
    while True:
        shares = remaining // len(left) if len(left) <= 2 else max(1, budget // (len(left) * rounds))
        shares = min(shares, remaining // len(left))  # several rounds of one playout each may have taken more than their part
        pulls = [(arm, number) for arm in left for number in range(len(found[arm]), len(found[arm]) + shares)]
        for (arm, _), value in zip(pulls, await play_round(pulls), strict=True):
            found[arm].append(value)
        remaining -= len(pulls)
        left = sorted(left, key=lambda arm: (-_mean(found[arm]), arm))
        if len(left) <= 2 or remaining < (half := -(-len(left) // 2)):
            break
        left = sorted(left[:half])
    return Halved(values=tuple(map(_mean, found)), visits=tuple(map(len, found)), best=left[0])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
