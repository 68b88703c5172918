"""Chooses the rows of a trainer step under a run's settings, and handles a shortage of fresh rows.

If there are too few rows, the step waits up to `storage.shortage_wait_s`, then takes older rows, up to a lag of
`storage.hard_policy_lag`, then trains on what there is, possibly on nothing. What was done is one sentence, for the log and the
step's ledger.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from storage.index import Index
from storage.selection import Selection, SelectionQuery
from storage.settings import StorageSettings

_POLL_S = 0.25
"""Seconds between two searches for new shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rows for a step, and what was done to get them."""

    selection: Selection
    waited_s: float
    """Seconds spent waiting for more rows."""
    shortage: str
    """What was done because there were too few; empty if there were enough."""
    patient: bool
    """True if the step waited, or took rows older than `storage.max_policy_lag`."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the step, by name."""
        return {
            "train/start_groups": float(self.selection.start_groups),
            "train/shortage_wait_s": self.waited_s,
            "train/policy_lag_allowed": float(self.selection.query.max_policy_lag),
        }


def batch_query(settings: StorageSettings, *, step: int, policy_version: int, start_groups: int, seed: int) -> SelectionQuery:
    """The query of `step` under a run's settings."""
    return SelectionQuery(
        step=step,
        policy_version=policy_version,
        max_policy_lag=settings.max_policy_lag,
        start_groups=start_groups,
        seed=seed,
        max_uses=settings.max_uses,
        draw=settings.draw,
        selection=settings.selection,
    )


def choose_batch(
    index: Index,
    settings: StorageSettings,
    *,
    step: int,
    policy_version: int,
    start_groups: int,
    seed: int,
    sleep: Callable[[float], None] = time.sleep,
) -> Choice:
    """Choose rows of `start_groups` start groups for `step`.

    Args:
        policy_version: the version that the trainer holds.
        seed: seed of the draw.
        sleep: waits for a number of seconds; tests replace it.
    """
    query = batch_query(settings, step=step, policy_version=policy_version, start_groups=start_groups, seed=seed)
    began = time.monotonic()
    index.refresh()
    selection = index.select_batch(query)
    while not selection.enough and (left := began + settings.shortage_wait_s - time.monotonic()) > 0:
        sleep(min(_POLL_S, left))
        if index.refresh():
            selection = index.select_batch(query)
    waited = time.monotonic() - began if settings.shortage_wait_s else 0.0
    for lag in range(settings.max_policy_lag + 1, settings.hard_policy_lag + 1):
        if selection.enough:
            break
        selection = index.select_batch(replace(query, max_policy_lag=lag))
    return Choice(
        selection=selection,
        waited_s=waited,
        shortage=_describe_shortage(selection, settings, waited),
        patient=waited >= _POLL_S or selection.query.max_policy_lag > settings.max_policy_lag,
    )


def _describe_shortage(selection: Selection, settings: StorageSettings, waited_s: float) -> str:
    lag, found, wanted = selection.query.max_policy_lag, selection.start_groups, selection.query.start_groups
    done = [f"waited {waited_s:.1f} s"] if waited_s >= _POLL_S else []
    done += [f"took rows of lag up to {lag}"] if lag > settings.max_policy_lag else []
    done += [] if selection.enough else [f"trains on {found} of {wanted} start groups"]
    return f"step {selection.query.step} found too few fresh rows: " + ", then ".join(done) if done else ""
