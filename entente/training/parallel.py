"""Data parallelism over advantage groups: the processes that torchrun started split the rows of an update.

Rank 0, the leader, owns the optimiser, the checkpoints and the run. For each update the other ranks receive the rows and the
current adapter, and compute the gradient of their part of the rows. All gradients are summed. The other ranks keep no state
between updates.

Every process divides its loss by constants of the *whole* update, so losses and gradients add up to those of one process. An
advantage group is never split. The parts have about equally many unique tokens, which is what a forward computes.

Each process has the whole base model, or with `training.split_base` a part of it. Then all run their forwards together: each
gathers a block's weights from all of them, uses the block, and drops the others' part.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from entente.training.micro_batches import UniqueTokens
from entente.training.objective import Objective
from storage.gather import Batch

_CLOSE_ENOUGH = 0.005
"""Relative precision to which the size of the largest part is minimised."""
_ROLLOUTS = timedelta(days=30)
"""Longest wait of ranks above 0 for the next update, during its rollouts. An exited process is noticed at once: by torchrun on
its machine, by closed connections on the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The trainer processes, as seen from one of them."""

    rank: int
    """Rank of this process; 0 is the leader."""
    local_rank: int
    """Its rank on its machine."""
    size: int
    control: Any
    """The gloo group for objectives and results. Weights and gradients use the default group: NCCL on GPUs."""

    @classmethod
    def join(cls) -> "Peers | None":
        """Join the processes that torchrun started; None if torchrun did not start this one."""
        if not dist.is_torchelastic_launched():
            return None
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        control = dist.new_group(backend="gloo", timeout=_ROLLOUTS)
        return cls(rank=dist.get_rank(), local_rank=int(os.environ["LOCAL_RANK"]), size=dist.get_world_size(), control=control)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, message: Any = None) -> Any:
        """Send the leader's message to every process; returns it. Other ranks' arguments are ignored."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def broadcast_weights(self, parameters: Iterable[Parameter]) -> None:
        weights = list(parameters)
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        dist.broadcast(flat, src=0)
        if not self.leads:
            with torch.no_grad():
                for weight, part in zip(weights, _parts(flat, weights), strict=True):
                    weight.copy_(part)

    def add_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Replace the gradients in every process by their sum over all processes; a missing gradient counts as 0."""
        weights = list(parameters)
        flat = torch.cat([_gradient(weight).flatten() for weight in weights])
        dist.all_reduce(flat)
        for weight, part in zip(weights, _parts(flat, weights), strict=True):
            weight.grad = part.clone()

    def gather(self, result: Any) -> list[Any]:
        """Results by rank in the leader; a list of None in the other ranks."""
        results: list[Any] = [None] * self.size
        dist.gather_object(result, results if self.leads else None, dst=0, group=self.control)
        return results

    def most(self, count: int) -> int:
        largest = torch.tensor(count, dtype=torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        return int(largest)


Compute = Callable[[Objective, Sequence[int], Sequence[int]], Any]
"""Computes an objective for some of its rows and of its targets' rows; the result goes to the leader, a gradient into the
parameters."""


def on_rank_0(peers: Peers, objective: Objective, parameters: Sequence[Parameter], compute: Compute) -> list[Any]:
    """Compute an objective on all ranks; returns their results by rank. The parameters then hold the gradient of all rows."""
    peers.broadcast(objective)
    return _take_part(peers, objective, parameters, compute)


def on_other_ranks(peers: Peers, parameters: Sequence[Parameter], compute: Compute) -> None:
    """Compute a part of every objective of the leader, until it exits."""
    while True:
        try:
            objective = peers.broadcast()
        except RuntimeError:  # the leader closed its connection
            return
        _take_part(peers, objective, parameters, compute)


def _take_part(peers: Peers, objective: Objective, parameters: Sequence[Parameter], compute: Compute) -> list[Any]:
    peers.broadcast_weights(parameters)
    mine = split_rows(objective.batch, objective.rows, peers.size)[peers.rank]
    if objective.advantages is None:
        return peers.gather(compute(objective, mine, ()))
    taught = (
        []
        if objective.distil_targets is None
        else split_rows(objective.distil_targets.batch, objective.taught, peers.size)[peers.rank]
    )
    result = compute(objective, mine, taught)
    peers.add_gradients(parameters)
    return peers.gather(result)


def split_rows(batch: Batch, rows: Sequence[int], size: int) -> list[list[int]]:
    """Split `rows` among `size` processes by whole advantage groups, so that the largest number of unique tokens is small.

    Groups are ordered by where they begin in the trie of all rows, and each process takes neighbours, which share their prompt
    prefix.
    """
    chosen = np.asarray(rows, np.int64)
    if size == 1 or not len(chosen):
        return [chosen.tolist(), *([] for _ in range(size - 1))]
    groups = batch.advantage_groups[chosen].astype(np.int64)
    groups = np.where(groups < 0, -1 - np.arange(len(chosen)), groups)  # rows chosen without a group: each is its own
    _, group = np.unique(groups, return_inverse=True)
    tokens = UniqueTokens(batch, chosen)
    # Groups without a branching token cost nothing and come last.
    first = np.full(int(group.max()) + 1, len(chosen))
    np.minimum.at(first, group[tokens.order], np.arange(len(tokens.order)))
    place = np.argsort(np.argsort(first, kind="stable"))[group]
    bounds = _even_bounds(len(first), size, cache(lambda low, high: tokens.of((place >= low) & (place < high))))
    owner = np.searchsorted(bounds, place, side="right")
    return [chosen[owner == rank].tolist() for rank in range(size)]


def _even_bounds(groups: int, size: int, tokens: Callable[[int, int], int]) -> list[int]:
    """Ends of `size` runs of groups, so that the largest run has few tokens.

    `tokens` counts the unique tokens of the groups [low, high); more groups never have fewer.
    """

    def fill(capacity: int) -> list[int] | None:
        """Ends of runs of at most `capacity` tokens; None if these do not cover all groups."""
        ends, low = [], 0
        for _ in range(size):
            least, most = low, groups  # the run can end at `least`; find the last end at which it still fits
            while least < most:
                middle = (least + most + 1) // 2
                if tokens(low, middle) <= capacity:
                    least = middle
                else:
                    most = middle - 1
            ends.append(least)
            low = least
        return ends if low == groups else None

    most = tokens(0, groups)
    least, bounds = most // size, [groups] * size
    while most - least > max(1, _CLOSE_ENOUGH * most):
        middle = (least + most) // 2
        if (ends := fill(middle)) is None:
            least = middle
        else:
            most, bounds = middle, ends
    return bounds


def _gradient(weight: Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _parts(flat: Tensor, weights: Sequence[Parameter]) -> list[Tensor]:
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]
