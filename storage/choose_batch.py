"""A step's rows under a run's settings: at once where there are enough; else after a wait, from further back, or fewer.

Promise: never waits beyond ``storage.shortage_wait_s``, and never takes a row beyond the larger of ``storage.max_policy_lag`` and
``storage.hard_policy_lag``. What was done about a shortage is a sentence, for the log and the step's ledger.
Never: decide what is enough to train on; a step without rows is a step.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from storage.index import Index
from storage.selection import Selection, SelectionQuery
from storage.settings import StorageSettings

_LOOK_S = 0.25
"""Seconds between two looks for new shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rows for a step, and how they were come by."""

    selection: Selection
    waited_s: float
    """Seconds spent waiting for more rows."""
    shortage: str
    """What was done because there were too few; empty if there were enough."""
    patient: bool
    """It waited, or reached back further than the budget says."""

    def metrics(self) -> dict[str, float]:
        """For the run's figures."""
        return {
            "train/start_groups": float(self.selection.start_groups),
            "train/shortage_wait_s": self.waited_s,
            "train/policy_lag_allowed": float(self.selection.query.max_policy_lag),
        }


def batch_query(
    settings: StorageSettings, *, step: int, policy_version: int, start_groups: int, lineage: str, seed: int
) -> SelectionQuery:
    """What ``step`` asks for under a run's settings."""
    return SelectionQuery(
        step=step,
        policy_version=policy_version,
        max_policy_lag=settings.max_policy_lag,
        start_groups=start_groups,
        lineage=lineage,
        seed=seed,
        max_uses=settings.max_uses,
        draw=settings.draw,
    )


def choose_batch(
    index: Index,
    settings: StorageSettings,
    *,
    step: int,
    policy_version: int,
    start_groups: int,
    lineage: str,
    seed: int,
    sleep: Callable[[float], None] = time.sleep,
) -> Choice:
    """Choose rows of ``start_groups`` start groups for ``step``; ``policy_version`` is what the trainer holds."""
    query = batch_query(settings, step=step, policy_version=policy_version, start_groups=start_groups, lineage=lineage, seed=seed)
    began = time.monotonic()
    index.refresh()
    selection = index.select_batch(query)
    while not selection.enough and (left := began + settings.shortage_wait_s - time.monotonic()) > 0:
        sleep(min(_LOOK_S, left))
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
        shortage=_sentence(selection, settings, waited),
        patient=waited >= _LOOK_S or selection.query.max_policy_lag > settings.max_policy_lag,
    )


def _sentence(selection: Selection, settings: StorageSettings, waited_s: float) -> str:
    lag, found, wanted = selection.query.max_policy_lag, selection.start_groups, selection.query.start_groups
    done = [f"waited {waited_s:.1f} s"] if waited_s >= _LOOK_S else []
    done += [f"took rows of lag up to {lag}"] if lag > settings.max_policy_lag else []
    done += [] if selection.enough else [f"trains on {found} of {wanted} start groups"]
    return f"step {selection.query.step} found too few fresh rows: " + ", then ".join(done) if done else ""
