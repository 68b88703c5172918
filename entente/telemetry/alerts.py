"""Rules over a run's metrics that raise alerts.

A rule examines the steps so far and returns a sentence or None; an alert is raised when it starts to fire."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

Figures = Mapping[str, float]
LAG_AT_CAP_STEPS = 5
"""Steps in a row with the median policy lag at the staleness budget."""
MISMATCH_MEAN = 0.05
"""Largest plausible mean |log ratio| at lag 0, nats: a correct pair has 0.01 to 0.02 where one side computes in 16 bits. Above
it, mask, temperature, ids or weights of trainer and engine differ."""
MISMATCH_MAX = 1e-4
"""Largest plausible |log ratio| at lag 0 where both sides compute in 32 bits or more, nats."""
MISMATCH_P99 = 0.3
"""99th percentile of |log ratio| at lag 0 that deserves a look, nats. Of 500 tokens it is the fifth largest: noise, so it stops
nothing."""
MISMATCH_TIMES = 10.0
"""Multiple of the run's median of the mismatch's 99th percentile at lag 0."""
NO_SPREAD_SHARE = 0.9
"""Share of fresh advantage groups with equal returns, which give no gradient."""
STALLED_MINUTES = 30.0
"""Without a finished step."""
NO_PROGRESS_STEPS = 100
ENTROPY_FLOOR = 0.02
"""Mean over legal sets, nats; below it the policy hardly explores."""
RATIO_OFF = 3.0
"""99th percentile of abs(ratio - 1): a ratio of 4 after a few updates means that the learning rate is too high."""
CLIPPED_SHARE = 0.25
"""Share of clipped tokens. The tiny model learns with a seventh clipped in its first steps."""
DISK_FREE_GIB = 2.0
_HISTORY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    """The name of a rule; the flow `recover-training` raises not_recovered."""
    run: str
    step: int
    sentence: str

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Watch:
    def __init__(
        self, run: str, *, max_policy_lag: int, folders: Sequence[Path], done: int = 0, past: Sequence[Figures] = ()
    ) -> None:
        """`done`: steps that a resumed run has done; `past`: their figures, which rules over several steps need."""
        self._run, self._max_lag, self._folders = run, max_policy_lag, folders
        self._steps: list[Figures] = [*past[-_HISTORY:]]
        self._step = done
        self._holding: set[str] = set()
        self._rules: dict[str, Callable[[], str | None]] = {
            "not_finite": self._not_finite,
            "no_progress": self._no_progress,
            "lag_at_cap": self._lag_at_cap,
            "mismatch": self._mismatch,
            "ratio": self._ratio,
            "entropy": self._entropy,
            "zero_std": self._zero_std,
            "worker_lost": self._worker_lost,
            "disk": self._disk,
        }

    def step(self, step: int, figures: Figures) -> list[Alert]:
        self._step = step
        self._steps = [*self._steps[1 - _HISTORY :], figures]
        self._holding.discard("stalled")
        return [alert for name, rule in self._rules.items() if (alert := self._raised(name, rule()))]

    def quiet(self, seconds: float) -> list[Alert]:
        """Check for a stall and a full disk between steps. Returns new alerts."""
        bound = 60 * STALLED_MINUTES
        sentence = f"no step was finished for {seconds / 60:.0f} minutes" if seconds >= bound else None
        alerts = [self._raised("stalled", sentence), self._raised("disk", self._disk())]
        return [alert for alert in alerts if alert]

    def _raised(self, name: str, sentence: str | None) -> Alert | None:
        if sentence is None:
            self._holding.discard(name)
            return None
        if name in self._holding:
            return None
        self._holding.add(name)
        return Alert(name=name, run=self._run, step=self._step, sentence=f"{self._run}, step {self._step}: {sentence}")

    # -- rules ----------------------------------------------------------------------------------------------------------

    def _values(self, name: str) -> list[float]:
        return [figures[name] for figures in self._steps if name in figures]

    def _last(self, name: str) -> float | None:
        return self._steps[-1].get(name)

    def _not_finite(self) -> str | None:
        if not self._last("train/skipped"):
            return None
        return "an update was skipped, because loss or gradient was not finite or there was nothing to train on"

    def _no_progress(self) -> str | None:
        returns, steps = self._values("train/reward"), NO_PROGRESS_STEPS
        if len(returns) < 2 * steps:
            return None
        before, since = fmean(returns[-2 * steps : -steps]), fmean(returns[-steps:])
        return (
            None
            if since > before
            else f"the mean return of the last {steps} steps, {since:+.3f}, is no better than {before:+.3f}"
        )

    def _lag_at_cap(self) -> str | None:
        steps, lags = LAG_AT_CAP_STEPS, self._values("train/policy_lag_p50")
        if not self._max_lag or len(lags) < steps or min(lags[-steps:]) < self._max_lag:
            return None
        return f"for {steps} steps half the rows were {self._max_lag} versions old, the limit of the staleness budget"

    def _mismatch(self) -> str | None:
        means = [mean for name in ("mismatch/mean", "train/log_ratio_lag0_mean") if (mean := self._last(name)) is not None]
        mean = max(means, default=0.0)
        if not all(each <= MISMATCH_MEAN for each in means):
            return (
                f"trainer and engine differ by {mean:.2g} nats on average at lag 0, more than {MISMATCH_MEAN:g}: look for a "
                "mask, a temperature, token ids or an adapter that only one of them has"
            )
        largest = self._last("mismatch/largest")
        if self._last("mismatch/rounded") == 0 and largest is not None and not largest <= MISMATCH_MAX:
            return (
                f"trainer and engine, both in 32 bits, differ by {largest:.2g} nats on a token, more than "
                f"{MISMATCH_MAX:g}: one of them computes wrongly, or the engine serves another version"
            )
        p99 = self._last("mismatch/p99")
        if p99 is not None and not p99 <= MISMATCH_P99:
            return f"trainer and engine differ by {p99:.2g} nats (99th percentile at lag 0), more than {MISMATCH_P99:g}"
        values = self._values("train/log_ratio_lag0_p99")
        now = self._last("train/log_ratio_lag0_p99")
        if now is None or len(values) < 6:
            return None
        usual = median(values[:-1])
        if now <= MISMATCH_TIMES * usual or now < 1e-3:  # below 1e-3, a tenfold change is rounding
            return None
        return f"trainer and engine differ by {now:.2g} nats (99th percentile at lag 0), usually by {usual:.2g}"

    def _ratio(self) -> str | None:
        off, clipped = self._last("train/ratio_deviation_p99") or 0.0, self._last("train/masked_share") or 0.0
        if off <= RATIO_OFF and clipped <= CLIPPED_SHARE:
            return None
        return (
            f"the policy changes too much in a step: the ratio differs from 1 by {off:.2g} (99th percentile), {clipped:.0%} of "
            f"the tokens are clipped; lower training.learning_rate, now {self._last('train/learning_rate') or 0.0:.2g}"
        )

    def _entropy(self) -> str | None:
        entropy, floor = self._last("train/entropy"), ENTROPY_FLOOR
        if entropy is None or entropy >= floor:
            return None
        return f"the policy's entropy is {entropy:.3f} nats, under {floor:g}: it hardly explores"

    def _zero_std(self) -> str | None:
        flat, usable = self._last("train/groups_zero_std"), self._last("train/groups_in_budget")
        if flat is None or not usable or flat / usable < NO_SPREAD_SHARE:
            return None
        return f"{flat / usable:.0%} of fresh groups have equal returns in all forks: they give no gradient"

    def _worker_lost(self) -> str | None:
        lost = self._last("engine/ejections") or 0
        return f"{lost:.0f} vLLM servers failed in this step" if lost else None

    def _disk(self) -> str | None:
        known = [(left / 2**30, folder) for folder in self._folders if (left := _free_bytes(folder)) is not None]
        free, folder = min(known, default=(DISK_FREE_GIB, Path()))
        return f"{free:.1f} GiB are free under '{folder}', less than {DISK_FREE_GIB:g}" if free < DISK_FREE_GIB else None


def _free_bytes(folder: Path) -> int | None:
    """None if the folder was removed, or a network's disk is away."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
