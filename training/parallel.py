"""Data parallel over advantage groups: several processes, each with the whole model, share the rows of an update.

The first process leads: it owns the optimiser, the checkpoints and the run, and is the trainer that the flow speaks to. The
others follow: for each update they get the rows and the adapter as it is, compute the gradient of their share, and add it to the
leader's. Followers keep nothing, so a resumed run needs nothing of them, and one that starts anew is no other follower.

Promise: an update's sum is divided by constants of the *whole* update wherever its rows are, so losses and gradients add up to
those of one process; an advantage group is never split.
The variables are those that torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); gloo on CPUs, NCCL on GPUs.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from storage.gather import Batch
from training.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The processes of a trainer, seen from one of them."""

    rank: int
    """Number of this one; 0 leads."""
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """This process owns the run."""
        return self.rank == 0

    def broadcast(self, message: Any = None) -> Any:
        """What the leader says, in every process; followers' own words do not count."""
        box = [message]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def broadcast_weights(self, parameters: Iterable[Parameter]) -> None:
        """Give every process the leader's weights."""
        weights = list(parameters)
        flat = torch.cat([weight.detach().flatten() for weight in weights])
        dist.broadcast(flat, src=0)
        if not self.leads:
            with torch.no_grad():
                for weight, part in zip(weights, _parts(flat, weights), strict=True):
                    weight.copy_(part)

    def add_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Give every process the sum of all gradients; a process without any counts as 0."""
        weights = list(parameters)
        flat = torch.cat([_gradient(weight).flatten() for weight in weights])
        dist.all_reduce(flat)
        for weight, part in zip(weights, _parts(flat, weights), strict=True):
            weight.grad = part.clone()

    def gather(self, found: Any) -> list[Any]:
        """What each process found, by rank; the leader's alone is whole."""
        everyones: list[Any] = [None] * self.size
        dist.gather_object(found, everyones if self.leads else None, dst=0)
        return everyones

    def leave(self) -> None:
        """End the group of this process."""
        dist.destroy_process_group()


def join_peers(device: torch.device) -> Peers | None:
    """The processes that the environment speaks of, met; None where this one is alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
    # Followers wait for the next update as long as its rollouts take; a process that is gone is noticed otherwise.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=30))
    return Peers(rank=dist.get_rank(), size=size, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """An update, as its processes need to know it."""

    batch: Batch
    rows: Sequence[int]
    """All rows of the update."""
    advantages: np.ndarray
    """float32 [rows of the batch]."""
    anchors: np.ndarray | None
    """As `Updater.accumulate` takes them."""
    objective: Objective
    """The loss, with its constants of the whole update."""


Gradient = Callable[[UpdateWork, Sequence[int]], Any]
"""Puts the gradient of some rows of an update into the parameters; what it found comes to the leader."""


def lead(peers: Peers, work: UpdateWork, parameters: Sequence[Parameter], gradient: Gradient) -> list[Any]:
    """One update together with the followers; the whole gradient stands in the parameters.

    Returns:
        What each process found, by rank.
    """
    peers.broadcast(work)
    return _take_part(peers, work, parameters, gradient)


def follow(peers: Peers, parameters: Sequence[Parameter], gradient: Gradient) -> None:
    """Take part in every update, until the leader dismisses its followers."""
    while (work := peers.broadcast()) is not None:
        _take_part(peers, work, parameters, gradient)


def _take_part(peers: Peers, work: UpdateWork, parameters: Sequence[Parameter], gradient: Gradient) -> list[Any]:
    peers.broadcast_weights(parameters)
    found = gradient(work, split_rows(work.batch, work.rows, peers.size)[peers.rank])
    peers.add_gradients(parameters)
    return peers.gather(found)


def split_rows(batch: Batch, rows: Sequence[int], size: int) -> list[list[int]]:
    """`rows` for each of `size` processes: whole advantage groups, about equally many tokens.

    Neighbouring groups stay together, since those of one position share the head of their prompts.
    """
    if not len(rows):
        return [[] for _ in range(size)]
    chosen = np.asarray(rows, np.int64)
    _, groups = np.unique(batch.advantage_groups[chosen], return_inverse=True)
    tokens = np.bincount(groups, weights=batch.input_offsets[chosen + 1] - batch.input_offsets[chosen])
    middle = np.cumsum(tokens) - tokens / 2
    owner = np.minimum((middle * size / tokens.sum()).astype(np.int64), size - 1)[groups]
    return [chosen[owner == rank].tolist() for rank in range(size)]


def _gradient(weight: Parameter) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def _parts(flat: Tensor, weights: Sequence[Parameter]) -> list[Tensor]:
    """`flat` cut into the shapes of `weights`."""
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]
