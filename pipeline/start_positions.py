"""Which positions start groups begin at, and which power the policy plays in each.

A draw depends on seed and step and, where `rollouts.sampling` asks for it, on what past start groups returned. For a step these
count only up to one that is complete before any task of the step can start: rollouts are ahead of the trainer by at most the
largest policy lag, for every buffer depth. So a step that is repeated draws the same.
"""

from collections.abc import Sequence

from game.snapshot import Snapshot
from pipeline.resources import PRODUCER, RolloutResources
from rollouts.seeds import seed_of
from state_cache.sampling import learnable_weights, sample_start_positions


def start_positions(resources: RolloutResources, step: int) -> list[tuple[Snapshot, str]]:
    """(snapshot, power that the policy plays) of each start group of `step`. Repeated calls return the same."""
    rollouts, train = resources.rollouts, resources.cache.train
    complete = max(0, step - 1 - resources.max_policy_lag)
    weights = _weights(resources, complete)
    return sample_start_positions(train, rollouts.start_groups, resources.seed, step, sampling=rollouts.sampling, weights=weights)


def producer_positions(resources: RolloutResources, producer: str, first_group: int, count: int) -> list[tuple[Snapshot, str]]:
    """(snapshot, power that the policy plays) of each start group of a producer other than the training flow's own.

    Positions are drawn in rounds of a step's size, like the training flow's own, but seeded by the producer's name: two producers
    share positions no more often than two steps do. A round is the same on each call.
    """
    rollouts, train, size = resources.rollouts, resources.cache.train, resources.rollouts.start_groups
    weights = _weights(resources, 0)
    seed, found = seed_of("producer", producer, resources.seed), []
    for number in range(first_group // size, (first_group + count - 1) // size + 1):
        found += sample_start_positions(train, size, seed, number + 1, sampling=rollouts.sampling, weights=weights)
    return found[first_group % size :][:count]


def _weights(resources: RolloutResources, complete: int) -> Sequence[float]:
    """Weight of each position in a draw that may know the returns of `complete` steps; empty if all have the same."""
    if resources.rollouts.sampling != "learnable":
        return ()
    before = complete * resources.rollouts.start_groups
    return learnable_weights(resources.cache.train, resources.past_returns.spreads_before(PRODUCER, before))
