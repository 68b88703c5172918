"""Chooses the best candidate within the constraints, or the one that misses them by least. Pure functions.

Figures with the adapter are compared, as in a run. A candidate is chosen only if it is faster than the current settings by more
than the passes of either differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuning.candidates import Candidate
from tuning.figures import ArmFigures
from tuning.job import Measured
from tuning.settings import TuneSettings

NOISE = 0.05
"""Smallest gain that counts, even if all passes agree."""

COMPUTES_IN_PROCESS = ("vllm", "torch")
"""Engines that compute in this process, so that its CPU time is theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The result of a comparison."""

    chosen: Candidate | None
    """None: no candidate meets the constraints."""
    nearest: Candidate | None
    """If none does: the candidate that misses them by least; None without measurements."""
    why: str
    """One sentence."""


def choose(candidates: Sequence[Candidate], found: Mapping[str, Measured], tuning: TuneSettings) -> Choice:
    """The best of the measured candidates.

    Args:
        found: measurements by candidate key.
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
    """The choice after a second measurement of the current and the chosen settings.

    Args:
        before: second measurement of `current`, the current settings.
        after: second measurement of the chosen settings.
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
    """Gain of `other` over `one` in wall time and, if the engine computes in the process, in CPU time.

    Other work on the machine changes wall time far more than CPU time.
    """
    gains = {"by the clock": other.decisions_per_s / one.decisions_per_s - 1}
    if by_cpu and other.cpu_ms:
        gains["in CPU time"] = one.cpu_ms / other.cpu_ms - 1
    return gains


def misses(on: ArmFigures, tuning: TuneSettings) -> list[tuple[float, str]]:
    """Violated constraints: the excess as a share of the bound, and a sentence."""
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
    """Cost of a thousand decisions, in the currency of the price."""
    return price_per_hour * 1000 / (3600 * decisions_per_s)
