"""What the past steps of a run would have trained on if another query had chosen their start groups.

Each step is looked at on its own: the query chooses among what that step could train on, after what the steps before it used in
fact. So the figures say what a query prefers, not where a run with it would have gone. Nothing is trained, and the run is not
changed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from storage.as_of import read_past_choice, rewind_tables
from storage.index import Index
from storage.own_selection import Key, keys_of, list_candidates, order_candidates
from storage.runs import RunPaths
from storage.selection import make_standings
from storage.settings import StorageSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """Start groups of a step. The means are over start groups; None: there are none."""

    start_groups: int
    mean_return: float | None
    spread: float | None
    """Mean over start groups of the mean spread of their advantage groups."""
    lag: float | None
    """Mean lag of the oldest row, versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedStep:
    """One step: what it trained on, and what the query would have chosen."""

    step: int
    lineage: str
    candidates: int
    """Start groups that it could train on."""
    in_fact: Preferred
    by_query: Preferred
    both: int
    """Start groups that are in both."""


def rehearse(
    paths: RunPaths, selection: str, steps: Iterable[int], storage_at: Callable[[int], StorageSettings]
) -> list[RehearsedStep]:
    """Let a query choose for past steps; returns them in ascending order.

    Args:
        selection: the query, as `storage.selection`.
        storage_at: the storage settings of a step, on which its returns depend.

    Raises:
        InputError: the query breaks a rule, or a step never was or does not say what its rows were chosen from.
    """
    found, index, rule = list[RehearsedStep](), None, None
    for step in sorted(steps, reverse=True):  # an index can only be rewound
        storage, then = storage_at(step), read_past_choice(paths, step)
        if index is None or rule != (storage.blend, storage.discount):
            index, rule = Index(paths, blend=storage.blend, discount=storage.discount), (storage.blend, storage.discount)
            index.refresh()
        make_standings(index.connection, then.query, rewind_tables(index, paths, then))
        query = replace(then.query, selection=selection)
        candidates, ordered = list_candidates(index.connection, query), order_candidates(index.connection, query)
        known = {key: row for key, row in zip(keys_of(candidates), candidates.to_pylist(), strict=True)}
        wanted = set(keys_of(ordered.slice(length=query.start_groups)))
        trained = set(keys_of(then.rows)) & set(known)  # a shard may be gone since
        found.append(
            RehearsedStep(
                step=step,
                lineage=then.lineage,
                candidates=candidates.num_rows,
                in_fact=_preferred(known, trained),
                by_query=_preferred(known, wanted),
                both=len(wanted & trained),
            )
        )
    return found[::-1]


def _preferred(known: dict[Key, dict[str, Any]], keys: set[Key]) -> Preferred:
    mean_return, spread, lag = (
        fmean(known[key][name] for key in sorted(keys)) if keys else None for name in ("mean_return", "spread", "lag")
    )
    return Preferred(start_groups=len(keys), mean_return=mean_return, spread=spread, lag=lag)
