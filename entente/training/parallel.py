"""Data parallelism over advantage groups: the processes that torchrun started split the rows of an update.

Rank 0 owns the optimiser, the checkpoints and the run. The other ranks receive the rows and the current adapter for each
update, compute the gradient of their part, and keep no state. Every rank normalises its loss by constants of the *whole*
update, so that summed gradients equal those of one process. An advantage group is never split; each part has about the same
number of unique tokens.

Each process holds the full base model, or with `training.fsdp` one shard of it (FSDP2). With FSDP2 all ranks run their forward
passes in lockstep and all-gather each block while it is in use.
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
"""Relative tolerance of the search for the smallest possible largest part."""
_ROLLOUTS = timedelta(days=30)
"""How long ranks above 0 wait for the next update. An exited process is noticed at once, by torchrun or a closed connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    rank: int
    local_rank: int
    size: int
    control: Any
    """The gloo group for objectives and results. Weights and gradients use the default group, which is NCCL on GPUs."""

    @classmethod
    def join(cls) -> "Peers | None":
        """None if torchrun did not start this process."""
        if not dist.is_torchelastic_launched():
            return None
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        control = dist.new_group(backend="gloo", timeout=_ROLLOUTS)
        return cls(rank=dist.get_rank(), local_rank=int(os.environ["LOCAL_RANK"]), size=dist.get_world_size(), control=control)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, message: Any = None) -> Any:
        """Return rank 0's message on every rank; the argument is ignored on the other ranks."""
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
        """All-reduce (sum); a missing gradient counts as 0."""
        weights = list(parameters)
        flat = torch.cat([_gradient(weight).flatten() for weight in weights])
        dist.all_reduce(flat)
        for weight, part in zip(weights, _parts(flat, weights), strict=True):
            weight.grad = part.clone()

    def gather(self, result: Any) -> list[Any]:
        """The results of all ranks on rank 0; a list of None on the other ranks."""
        results: list[Any] = [None] * self.size
        dist.gather_object(result, results if self.leads else None, dst=0, group=self.control)
        return results

    def most(self, count: int) -> int:
        largest = torch.tensor(count, dtype=torch.int64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        return int(largest)


Compute = Callable[[Objective, Sequence[int]], Any]
"""Maps an objective and this process's rows to a result for rank 0; accumulates gradients in the parameters."""


def on_rank_0(peers: Peers, objective: Objective, parameters: Sequence[Parameter], compute: Compute) -> list[Any]:
    """Results by rank. If the objective has advantages, the parameters then hold the gradient of all rows."""
    peers.broadcast(objective)
    return _take_part(peers, objective, parameters, compute)


def on_other_ranks(peers: Peers, parameters: Sequence[Parameter], compute: Compute) -> None:
    while True:
        try:
            objective = peers.broadcast()
        except RuntimeError:  # the leader closed its connection
            return
        _take_part(peers, objective, parameters, compute)


def _take_part(peers: Peers, objective: Objective, parameters: Sequence[Parameter], compute: Compute) -> list[Any]:
    peers.broadcast_weights(parameters)
    mine = split_rows(objective.batch, objective.rows, peers.size)[peers.rank]
    result = compute(objective, mine)
    if objective.advantages is not None:
        peers.add_gradients(parameters)
    return peers.gather(result)


def split_rows(batch: Batch, rows: Sequence[int], size: int) -> list[list[int]]:
    """Split `rows` into `size` parts of whole advantage groups, so that the largest part has few unique tokens.

    Each part consists of groups that are adjacent in the prefix trie of all rows, because these share prompt prefixes."""
    chosen = np.asarray(rows, np.int64)
    if size == 1 or not len(chosen):
        return [chosen.tolist(), *([] for _ in range(size - 1))]
    groups = batch.advantage_groups[chosen].astype(np.int64)
    groups = np.where(groups < 0, -1 - np.arange(len(chosen)), groups)  # a row without a group is a group of its own
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
    """Ends of `size` ranges of groups, so that the largest has few tokens. `tokens`: number of unique tokens in [low, high)."""

    def fill(capacity: int) -> list[int] | None:
        """Ends of ranges of at most `capacity` tokens each; None if `size` ranges do not cover all groups."""
        ends, low = [], 0
        for _ in range(size):
            least, most = low, groups  # the range can end at `least`; find the last end at which it fits
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
