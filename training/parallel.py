"""Data parallelism over advantage groups: several processes, each with the whole model, share the rows of an update.

The first process, the leader, is the trainer process: it owns the optimiser, the checkpoints and the run. For each update the
other processes, the followers, receive the rows and the current adapter, and compute the gradient of their share of the rows. All
gradients are summed. Followers keep no state between updates.

Every process divides its loss by constants of the *whole* update, so losses and gradients add up to those of one process. An
advantage group is never split. Processes find each other by torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT), and use gloo on CPUs and NCCL on GPUs.
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
from storage.lesson_shelf import LessonBatch
from training.objective import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The process group of a trainer, from the view of one process."""

    rank: int
    """Number of this process; 0 is the leader."""
    size: int
    """Number of processes."""
    device: torch.device

    @property
    def leads(self) -> bool:
        """True in the leader."""
        return self.rank == 0

    def broadcast(self, message: Any = None) -> Any:
        """Send the leader's message to every process; returns it. The argument of a follower is ignored."""
        box = [message]
        dist.broadcast_object_list(box, src=0, device=self.device)
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
        dist.gather_object(found, results if self.leads else None, dst=0)
        return results

    def leave(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


def join_peers(device: torch.device) -> Peers | None:
    """Join the process group that the environment describes; None if it describes a single process."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
    # Followers wait for the next update while its rollouts are played, so the timeout is long. The end of a process is noticed by
    # its parent or by its follower threads.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=30))
    return Peers(rank=dist.get_rank(), size=size, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWork:
    """The input of an update, sent to every process."""

    batch: Batch
    rows: Sequence[int]
    """All rows of the update."""
    advantages: np.ndarray
    """float32 [rows of the batch]."""
    anchors: np.ndarray | None
    """As in `Updater.accumulate`."""
    objective: Objective
    """The loss, with its constants of the whole update."""
    lessons: LessonBatch | None = None
    """The lessons of the step; None: it has none."""
    taught: Sequence[int] = ()
    """All rows of `lessons` of the update."""


Gradient = Callable[[UpdateWork, Sequence[int], Sequence[int]], Any]
"""Computes the gradient of some rows and some rows of the lessons of an update into the parameters; its result is sent to the
leader."""


def lead(peers: Peers, work: UpdateWork, parameters: Sequence[Parameter], gradient: Gradient) -> list[Any]:
    """Compute one update's gradient together with the followers. Afterwards the parameters hold the gradient of all rows.

    Returns:
        The result of each process, by rank.
    """
    peers.broadcast(work)
    return _take_part(peers, work, parameters, gradient)


def follow(peers: Peers, parameters: Sequence[Parameter], gradient: Gradient) -> None:
    """Take part in every update until the leader broadcasts None."""
    while (work := peers.broadcast()) is not None:
        _take_part(peers, work, parameters, gradient)


def _take_part(peers: Peers, work: UpdateWork, parameters: Sequence[Parameter], gradient: Gradient) -> list[Any]:
    peers.broadcast_weights(parameters)
    taught = [] if work.lessons is None else split_rows(work.lessons.batch, work.taught, peers.size)[peers.rank]
    found = gradient(work, split_rows(work.batch, work.rows, peers.size)[peers.rank], taught)
    peers.add_gradients(parameters)
    return peers.gather(found)


def split_rows(batch: Batch, rows: Sequence[int], size: int) -> list[list[int]]:
    """Split `rows` among `size` processes: whole advantage groups, with about equally many tokens each.

    Neighbouring groups go to the same process, because groups of one position share their prompt prefix.
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
    """`flat` split into tensors of the shapes of `weights`."""
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view_as(weight) for piece, weight in zip(pieces, weights, strict=True)]
