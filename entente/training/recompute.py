"""One forward of one decision under stored weights, for `entente view`: entropy, gap to the engine, clipped or left out.

    python -m entente.training.recompute JOB

Computes on the CPU, with one thread, and changes nothing: a run may train beside it. JOB has the fields of `Job` as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pydantic import BaseModel

from entente.decoding.weight_files import weight_files
from entente.telemetry.errors import EntenteError, InputError
from entente.telemetry.machine import free_memory
from entente.training.losses import SampledTokens, policy_loss
from entente.training.micro_batches import plan
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from storage.arrow_files import as_array
from storage.gather import MappedShards, gather

_ROOM = 1.5
"""Free memory per byte of weights."""


class Job(BaseModel):
    shards: Path
    shard: str
    row: int
    model: Path
    adapter: Path | None
    """Folder of the weights; None: the base."""
    training: TrainingSettings
    advantage: float


def recompute(job: Job) -> dict[str, list[Any]]:
    """By branching token, in order: its place in the completion, entropy and log pi - log b in nats, and what the loss does."""
    size = sum(file.stat().st_size for file in weight_files(job.model))
    if free_memory() < _ROOM * size:
        raise InputError(
            f"the model has {size / 2**30:.1f} GiB of weights, and this machine has less than {_ROOM:g} times that free"
        )
    on_cpu = {"device": "cpu", "gradient_checkpointing": False, "fsdp": False, "attention": "ranges"}
    settings = job.training.model_copy(update=on_cpu)
    policy = Policy(job.model, settings)
    if job.adapter is not None:
        policy.load_adapter(job.adapter)
    shards = MappedShards(job.shards)
    checksum = as_array(shards.get(job.shard).table["checksum"])[job.row].as_py()
    chosen = {"shard": [job.shard], "row": pa.array([job.row], pa.int32()), "checksum": pa.array([checksum], pa.uint32())}
    batch = gather(pa.table(chosen | {"return": [0.0], "advantage_group": pa.array([-1], pa.int32())}), shards.get)
    found: dict[str, list[Any]] = {"place": [], "entropy": [], "gap": [], "fate": []}
    for micro in plan(batch, [0], len(batch.input_ids)):
        with torch.no_grad():
            figures = policy.masked_logprobs(micro)
        logprobs, behaviour = figures["chosen"].float(), torch.from_numpy(micro.behaviour)
        tokens = SampledTokens(
            logprobs=logprobs,
            behaviour=behaviour,
            advantages=torch.full_like(logprobs, job.advantage),
            decisions=torch.from_numpy(micro.batch_row),
            proximal=logprobs if settings.importance_cap else None,
        )
        found["gap"] += (logprobs - behaviour).tolist()  # now, because a user's loss may write into its tokens
        loss = policy_loss(settings.loss).of(tokens, settings)
        fates = np.array(["trained", "clipped from below", "clipped from above", "left out"])
        fate = np.maximum.reduce([loss.clipped_low.numpy() * 1, loss.clipped_high.numpy() * 2, loss.outlier.numpy() * 3])
        found["place"] += micro.completion_index.tolist()
        found["entropy"] += figures["entropy"].tolist()
        found["fate"] += fates[fate].tolist()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        sys.stdout.write(json.dumps(recompute(Job.model_validate_json(sys.argv[1]))))
    except EntenteError as error:
        sys.exit(str(error))
