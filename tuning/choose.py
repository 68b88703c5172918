"""Which candidate is the best within the constraints, and by how much the nearest misses them. Pure.

What is compared are figures with the adapter on, for that is how the engine will be used. A candidate must beat the settings in
force by more than the passes of either differ among themselves: else those stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuning.candidates import Candidate
from tuning.figures import ArmFigures
from tuning.job import Measured
from tuning.settings import TuneSettings

NOISE = 0.05
"""Gain below which nothing is believed, however alike the passes were."""


COMPUTES_IN_PROCESS = ("vllm", "torch")
"""Engines whose CPU time is seen; the rest is a GPU's, or another process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What came of the comparison."""

    chosen: Candidate | None
    """None: nothing holds the constraints."""
    nearest: Candidate | None
    """Where nothing does: the one that misses them by least; None where nothing was measured."""
    why: str
    """One sentence."""


def choose(candidates: Sequence[Candidate], found: Mapping[str, Measured], tuning: TuneSettings) -> Choice:
    """The best of those that were measured.

    Args:
        found: by the candidates' keys.
    """
    measured = [(each, found[each.key].arms["on"]) for each in candidates if each.key in found and found[each.key].arms]
    if not measured:
        return Choice(chosen=None, nearest=None, why="no candidate could be measured")
    holding = [(each, on) for each, on in measured if not misses(on, tuning)]
    if not holding:
        nearest, on = min(measured, key=lambda pair: max(share for share, _ in misses(pair[1], tuning)))
        sentences = " and ".join(sentence for _, sentence in misses(on, tuning))
        return Choice(
            chosen=None, nearest=nearest, why=f"no candidate holds the constraints; the nearest misses them: {sentences}"
        )
    best, on = max(holding, key=lambda pair: pair[1].decisions_per_s)
    current = next(((each, figures) for each, figures in holding if each.current), None)
    if current is not None and best is not current[0]:
        before = current[1]
        gain, noise = on.decisions_per_s / before.decisions_per_s - 1, max(on.spread, before.spread, NOISE)
        if gain <= noise:
            return Choice(
                chosen=current[0],
                nearest=None,
                why=f"the settings in force stay: the fastest candidate gains {gain:.0%}, and passes alike differ by {noise:.0%}",
            )
    if best.current:
        return Choice(chosen=best, nearest=None, why="the settings in force are the fastest that hold the constraints")
    return Choice(chosen=best, nearest=None, why="the most decisions a second with the adapter on, within the constraints")


def confirmed(choice: Choice, before: Measured, after: Measured, tuning: TuneSettings, current: Candidate) -> Choice:
    """The choice in the light of a second measurement of both, one right after the other.

    Args:
        before: of the settings in force, which are `current`.
        after: of the chosen ones.
    """
    if not before.arms or not after.arms or misses(before.arms["on"], tuning):
        return choice
    one, other = before.arms["on"], after.arms["on"]
    gains = _gains(one, other, by_cpu=after.engine in COMPUTES_IN_PROCESS)
    gain, noise = min(gains.values()), max(one.spread, other.spread, NOISE)
    gained = " and ".join(f"{each:+.0%} {clock}" for clock, each in gains.items())
    missed = misses(other, tuning)
    if gain > noise and not missed:
        return Choice(chosen=choice.chosen, nearest=None, why=f"{choice.why}; measured again beside those in force: {gained}")
    found = f"it misses the constraints: {missed[0][1]}" if missed else f"{gained}, where passes differ by {noise:.0%}"
    why = f"the settings in force stay: measured again right after them, the fastest candidate does not hold up: {found}"
    return Choice(chosen=current, nearest=None, why=why)


def _gains(one: ArmFigures, other: ArmFigures, *, by_cpu: bool) -> dict[str, float]:
    """What `other` gains on `one`, clock by clock; CPU time where the engine computes in the process.

    What others do on the machine moves the clock's seconds many times over, and those of the CPU by little.
    """
    gains = {"by the clock": other.decisions_per_s / one.decisions_per_s - 1}
    if by_cpu and other.cpu_ms:
        gains["in CPU time"] = one.cpu_ms / other.cpu_ms - 1
    return gains


def misses(on: ArmFigures, tuning: TuneSettings) -> list[tuple[float, str]]:
    """Constraints that these figures do not hold: by which share of the bound, and in words."""
    missed = []
    if on.e2el_ms_p99 > tuning.max_latency_ms:
        over = on.e2el_ms_p99 - tuning.max_latency_ms
        missed.append(
            (
                over / tuning.max_latency_ms,
                f"its P99 latency of {on.e2el_ms_p99:,.0f} ms exceeds max_latency_ms {tuning.max_latency_ms:,.0f} "
                f"by {over:,.0f} ms",
            )
        )
    if on.cache_hit < tuning.min_cache_hit:
        under = tuning.min_cache_hit - on.cache_hit
        missed.append(
            (
                under / tuning.min_cache_hit,
                f"its cache hit share of {on.cache_hit:.3f} is below min_cache_hit {tuning.min_cache_hit:g} by {under:.3f}",
            )
        )
    return missed


def cost_per_thousand(decisions_per_s: float, price_per_hour: float) -> float:
    """What a thousand decisions cost, in the price's currency."""
    return price_per_hour * 1000 / (3600 * decisions_per_s)
