"""What is worth waking somebody for: rules over a run's figures, and the hooks that carry an alert outside.

Each rule looks at the steps so far and says a sentence, or nothing. An alert is raised when its rule begins to hold, not again
while it goes on, and once more after it was over for a step. A hook that fails is said once and never hinders the run.
"""

import json
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

Figures = Mapping[str, float]
HOOK_TIMEOUT_S = 20.0
LAG_AT_CAP_STEPS = 5
"""Steps in a row whose rows are as stale as the budget allows, on the median."""
MISMATCH_TIMES = 10.0
"""Times its median that the 99th percentile of trainer against engine may be, at lag 0."""
NO_SPREAD_SHARE = 0.9
"""Share of fresh advantage groups whose returns are all equal, which teach nothing."""
_HISTORY = 512
"""Steps that rules look back over."""


class AlertSettings(BaseModel):
    """When a run calls for help, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    # These two are in no deployment's schema: what runs in a shell or is posted somewhere never arrives from Prefect's server.
    command: SkipJsonSchema[str] = ""
    """Shell command that gets each alert as one JSON object on its standard input, such as 'mail -s alert me@example.org'. On the
    command line and in its files only: what Prefect starts names a `file`."""
    webhook: SkipJsonSchema[str] = ""
    """Address that each alert is posted to, as one JSON object; where it may stand, see `command`."""
    file: str = ""
    """Name of a file on the machine that trains, which says `command` and `webhook` in their place: 'mine' is
    `mine.toml` in `_alerts` under `runs_root`; empty: none."""
    stalled_minutes: Annotated[float, Field(ge=0)] = 30.0
    """Minutes without a finished step after which the run counts as stalled; 0: never."""
    no_progress_steps: Annotated[int, Field(ge=0)] = 100
    """Steps in which the mean return did not rise above what it was before; 0: never."""
    entropy_floor: Annotated[float, Field(ge=0)] = 0.02
    """Nats of mean entropy over legal sets under which the policy tries nothing new; 0: never."""
    disk_free_gib: Annotated[float, Field(ge=0)] = 2.0
    """Free space under the run's folder, GiB, below which it is said before the disk is full; 0: never."""
    silent: tuple[Literal["not_finite", "lag_at_cap", "mismatch", "no_spread", "worker_lost"], ...] = ()
    """Rules that raise no alert. The other rules have a bound that switches them off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that began to be wrong."""

    name: str
    """The rule: stalled, no_progress, not_finite, lag_at_cap, mismatch, entropy, no_spread, disk, worker_lost; by whoever looks
    after all runs, also not_recovered, pool_without_worker, schedules_cancelled, schedule_overlaps."""
    run: str
    step: int
    """The newest finished step."""
    sentence: str

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


class Watch:
    """Raises alerts of one run; keeps the steps that its rules look back over."""

    def __init__(self, run: str, settings: AlertSettings, *, max_policy_lag: int, folder: Path) -> None:
        """`folder`: where the run lies, whose disk is watched."""
        self._run, self._settings, self._max_lag, self._folder = run, settings, max_policy_lag, folder
        self._steps: list[Figures] = []
        self._step = 0
        self._holding: set[str] = set()
        self._rules: dict[str, Callable[[], str | None]] = {
            "not_finite": self._not_finite,
            "no_progress": self._no_progress,
            "lag_at_cap": self._lag_at_cap,
            "mismatch": self._mismatch,
            "entropy": self._entropy,
            "no_spread": self._no_spread,
            "worker_lost": self._worker_lost,
            "disk": self._disk,
        }
        for name in settings.silent:
            del self._rules[name]

    def step(self, step: int, figures: Figures) -> list[Alert]:
        """A step is done: the alerts that begin with it."""
        self._step = step
        self._steps = [*self._steps[1 - _HISTORY :], figures]
        self._holding.discard("stalled")
        return [alert for name, rule in self._rules.items() if (alert := self._raised(name, rule()))]

    def quiet(self, seconds: float) -> list[Alert]:
        """No step was done for so long: the alert that the run is stalled, if it begins."""
        bound = 60 * self._settings.stalled_minutes
        said = f"no step was finished for {seconds / 60:.0f} minutes" if bound and seconds >= bound else None
        return [alert for alert in [self._raised("stalled", said)] if alert]

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
        returns, steps = self._values("train/return_mean"), self._settings.no_progress_steps
        if not steps or len(returns) < 2 * steps:
            return None
        before, since = _mean(returns[-2 * steps : -steps]), _mean(returns[-steps:])
        return (
            None
            if since > before
            else f"the mean return of the last {steps} steps, {since:+.3f}, is no better than {before:+.3f}"
        )

    def _lag_at_cap(self) -> str | None:
        steps, lags = LAG_AT_CAP_STEPS, self._values("train/policy_lag_p50")
        if not self._max_lag or len(lags) < steps or min(lags[-steps:]) < self._max_lag:
            return None
        return f"for {steps} steps half the rows were {self._max_lag} versions old, as stale as the budget allows"

    def _mismatch(self) -> str | None:
        values = self._values("train/log_ratio_lag0_p99")
        now = self._last("train/log_ratio_lag0_p99")
        if now is None or len(values) < 6:
            return None
        usual = median(values[:-1])
        if now <= MISMATCH_TIMES * usual or now < 1e-3:  # rounding may jump tenfold and mean nothing
            return None
        return f"trainer and engine differ by {now:.2g} nats (99th percentile at lag 0), usually by {usual:.2g}"

    def _entropy(self) -> str | None:
        entropy, floor = self._last("train/entropy"), self._settings.entropy_floor
        if entropy is None or entropy >= floor:
            return None
        return f"the policy's entropy is {entropy:.3f} nats, under {floor:g}: it hardly tries anything new"

    def _no_spread(self) -> str | None:
        flat, usable = self._last("train/groups_no_spread"), self._last("train/groups_eligible")
        if flat is None or usable is None or flat + usable == 0 or flat / (flat + usable) < NO_SPREAD_SHARE:
            return None
        return f"{flat / (flat + usable):.0%} of fresh groups have the same return in every fork: they teach nothing"

    def _worker_lost(self) -> str | None:
        lost = self._last("engine/ejections") or 0
        return f"{lost:.0f} inference workers left the pool in this step" if lost else None

    def _disk(self) -> str | None:
        free = shutil.disk_usage(self._folder).free / 2**30
        bound = self._settings.disk_free_gib
        return f"{free:.1f} GiB are free under '{self._folder}', less than {bound:g}" if free < bound else None


def carry(alert: Alert, settings: AlertSettings) -> list[str]:
    """Give the alert to the hooks; what went wrong with them, in sentences. Blocks for up to `HOOK_TIMEOUT_S` each."""
    message, troubles = alert.as_json(), []
    if settings.command:
        try:
            done = subprocess.run(
                settings.command,
                shell=True,
                input=message + "\n",
                text=True,
                capture_output=True,
                timeout=HOOK_TIMEOUT_S,
                check=False,
            )
            if done.returncode:
                said = (done.stderr or done.stdout).strip().splitlines()
                troubles.append(f"alerts.command ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")
        except subprocess.TimeoutExpired:
            troubles.append(f"alerts.command did not end within {HOOK_TIMEOUT_S:g} s")
    if settings.webhook:
        kind = {"content-type": "application/json"}
        try:
            request = urllib.request.Request(settings.webhook, data=message.encode(), headers=kind, method="POST")
            with urllib.request.urlopen(request, timeout=HOOK_TIMEOUT_S):
                pass
        except (OSError, ValueError) as error:
            troubles.append(f"alerts.webhook '{settings.webhook}' could not be reached: {error}")
    return troubles


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
