"""Data parallelism over advantage groups: several processes, which torchrun started, share the rows of an update.

The process of rank 0, the leader, owns the optimiser, the checkpoints and the run. For each update the other processes, the
followers, receive the rows and the current adapter, and compute the gradient of their share of the rows. All gradients are
summed. Followers keep no state between updates.

Every process divides its loss by constants of the *whole* update, so losses and gradients add up to those of one process. An
advantage group is never split. The shares have about equally many unique tokens, which is what a forward computes.

Each process has the whole base model, or with `training.split_base` a part of it. Then all run their forwards together: each
gathers a block's weights from all of them, uses the block, and forgets the others' part.
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
"""Shares are balanced until the largest is known to this share of its smallest possible size."""
_ROLLOUTS = timedelta(days=30)
"""Longest wait of a follower for the next update, while its rollouts are played. The end of a process is noticed at once: by
torchrun on its machine, by its closed connections on the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The processes of a trainer, from the view of one of them."""

    rank: int
    """Number of this process; 0 is the leader."""
    local_rank: int
    """Its number on its machine."""
    size: int
    """Number of processes."""
    control: Any
    """The gloo group for objectives and results. Weights and gradients go over the default group, which is of NCCL on GPUs."""

    @classmethod
    def join(cls) -> "Peers | None":
        """Meet the processes that torchrun started with this one; None if torchrun did not start it."""
        if not dist.is_torchelastic_launched():
            return None
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        control = dist.new_group(backend="gloo", timeout=_ROLLOUTS)
        return cls(rank=dist.get_rank(), local_rank=int(os.environ["LOCAL_RANK"]), size=dist.get_world_size(), control=control)

    @property
    def leads(self) -> bool:
        """True in the leader."""
        return self.rank == 0

    def broadcast(self, message: Any = None) -> Any:
        """Send the leader's message to every process; returns it. The argument of a follower is ignored."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def broadcast_weights(self, parameters: Iterable[Parameter]) -> None:
        """Copy the leader's weights to every process."""
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

    def gather(self, found: Any) -> list[Any]:
        """Results of all processes by rank, in the leader; a list of None in a follower."""
        results: list[Any] = [None] * self.size
        dist.gather_object(found, results if self.leads else None, dst=0, group=self.control)
        return results

    def most(self, count: int) -> int:
        """The largest count of all processes."""
        found = torch.tensor(count, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return int(found)


Compute = Callable[[Objective, Sequence[int], Sequence[int]], Any]
"""Computes an objective's part for some of its rows and of its lessons' rows; its result is sent to the leader. A gradient is
computed into the parameters."""


def lead(peers: Peers, objective: Objective, parameters: Sequence[Parameter], compute: Compute) -> list[Any]:
    """Compute an objective together with the followers. A gradient in the parameters is then that of all its rows.

    Returns:
        The result of each process, by rank.
    """
    peers.broadcast(objective)
    return _take_part(peers, objective, parameters, compute)


def follow(peers: Peers, parameters: Sequence[Parameter], compute: Compute) -> None:
    """Take part in every objective of the leader, until it ends."""
    while True:
        try:
            objective = peers.broadcast()
        except RuntimeError:  # the leader's connection has closed
            return
        _take_part(peers, objective, parameters, compute)


def _take_part(peers: Peers, objective: Objective, parameters: Sequence[Parameter], compute: Compute) -> list[Any]:
    peers.broadcast_weights(parameters)
    mine = split_rows(objective.batch, objective.rows, peers.size)[peers.rank]
    if objective.advantages is None:
        return peers.gather(compute(objective, mine, ()))
    taught = [] if objective.lessons is None else split_rows(objective.lessons.batch, objective.taught, peers.size)[peers.rank]
    found = compute(objective, mine, taught)
    peers.add_gradients(parameters)
    return peers.gather(found)


def split_rows(batch: Batch, rows: Sequence[int], size: int) -> list[list[int]]:
    """Split `rows` among `size` processes: whole advantage groups, so that the largest number of unique tokens is small.

    Groups are put in the order in which they begin in the trie of all rows, and each process takes neighbours, which share their
    prompt prefix.
    """
    chosen = np.asarray(rows, np.int64)
    if size == 1 or not len(chosen):
        return [chosen.tolist(), *([] for _ in range(size - 1))]
    groups = batch.advantage_groups[chosen].astype(np.int64)
    groups = np.where(groups < 0, -1 - np.arange(len(chosen)), groups)  # not chosen by group: each row is one
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
    """Where each of `size` runs of groups ends, so that the largest run has few tokens.

    Args:
        tokens: unique tokens of the groups [low, high); never fewer for more groups.
    """

    def fill(capacity: int) -> list[int] | None:
        """Ends of runs of at most `capacity` tokens; None if they do not hold all groups."""
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
    least, found = most // size, [groups] * size
    while most - least > max(1, _CLOSE_ENOUGH * most):
        middle = (least + most) // 2
        if (ends := fill(middle)) is None:
            least = middle
        else:
            most, found = middle, ends
    return found


def _gradient(weight: Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _parts(flat: Tensor, weights: Sequence[Parameter]) -> list[Tensor]:
    """`flat` split into tensors of the shapes of `weights`."""
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]
