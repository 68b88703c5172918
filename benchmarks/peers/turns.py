"""Arms that take turns, and the ratios of their CPU seconds.

Each round measures every arm once, on the same work. A figure is the median over the rounds of theirs over ours, so above 1 ours
costs less. The first round warms up and does not count.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from telemetry.progress import reporter

Arm = Callable[[int], float]
"""Measures round N, from 0, and returns CPU seconds."""
OURS = "ours"


def take_turns(arms: Mapping[str, Arm], rounds: int, label: str) -> list[dict[str, float]]:
    """CPU seconds of each arm in each round that counts. Every second round measures the arms in reverse order."""
    measured = []
    for number in range(rounds + 1):
        names = list(arms) if number % 2 else list(arms)[::-1]
        spent = {name: arms[name](number) for name in names}
        seconds = ", ".join(f"{name} {spent[name]:.3g} s" for name in arms)
        reporter().say(f"{label}, {f'round {number} of {rounds}' if number else 'warm-up'}: {seconds}")
        measured.append({name: spent[name] for name in arms})
    return measured[1:]


def ratio(rounds: Sequence[Mapping[str, float]], theirs: str, ours: str = OURS) -> float:
    """Median over the rounds of the CPU seconds of `theirs` over those of `ours`."""
    return median(spent[theirs] / spent[ours] for spent in rounds)


def middle(rounds: Sequence[Mapping[str, float]], arm: str) -> float:
    """Median CPU seconds of an arm."""
    return median(spent[arm] for spent in rounds)
