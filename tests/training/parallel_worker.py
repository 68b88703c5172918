"""What the data-parallel tests run: two updates of a small model, in one process or, under torchrun, in several.

torchrun parallel_worker.py MODEL FILE RUNS      RUNS: a list of training settings as JSON
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from benchmarks.trainer_cases import Case, made_up_batch, stir_adapter
from entente.training.parallel import Peers, on_other_ranks
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from entente.training.update import Updater
from storage.gather import Batch

CONFIG = Qwen3Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    max_position_embeddings=4096,
)
CASE = Case(positions=5, forks=3, own=30, completion=12, spread=0.4)


class RunEnded(Exception):
    """There is no more work of a run."""


class NoWork:
    """Sent after a run's last work; a follower that looks into it is done with the run."""

    @property
    def batch(self) -> Batch:
        raise RunEnded


def gradient_of(policy: Policy) -> np.ndarray:
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return np.concatenate([gradient.double().flatten().cpu().numpy() for gradient in gradients])


def two_updates(model: Path, folder: Path, given: dict[str, Any], peers: Peers | None = None) -> dict[str, Any]:
    """Two updates, the second on weights that the first one moved; in a follower, its part in them."""
    torch.set_num_threads(1)
    settings = TrainingSettings.model_validate(
        {"device": "cpu", "learning_rate": 1e-2, "updates_per_step": 2, "kl_weight": 0.05, "token_budget": 256} | given
    )
    policy = Policy(model, settings, fsdp=settings.fsdp)
    updater = Updater(policy, settings, peers)
    if peers is not None and not peers.leads:
        with suppress(RunEnded):
            on_other_ranks(peers, policy.parameters(), updater.compute)
        return {}
    stir_adapter(policy.parameters(), seed=1)  # not that of the followers, which take the leader's weights
    batch = made_up_batch(CASE, vocabulary=CONFIG.vocab_size)
    found: dict[str, Any] = {"losses": [], "gradients": [], "tokens": []}
    found["weights_here"] = sum(getattr(weight, "_local_tensor", weight).numel() for weight in policy.model.parameters())
    index, logprobs = updater.evaluate(batch, range(CASE.rows))
    order = np.argsort(index)
    found["logprobs"] = (index[order], logprobs[order])
    for update in updater.updates(batch):
        found["losses"].append(update.loss)
        found["gradients"].append(gradient_of(policy))
        found["tokens"].append(len(update.tokens))
    policy.save_adapter(folder)  # with a split base too
    policy.load_adapter(folder)
    found["weights"] = [weight.detach().clone() for weight in policy.parameters()]
    if peers is not None:
        peers.broadcast(NoWork())
        peers.broadcast_weights(policy.parameters())
    return found


def main(model: Path, file: Path, runs: list[dict[str, Any]]) -> None:
    """The runs one after the other."""
    peers = Peers.join()
    assert peers is not None
    found = [two_updates(model, file.parent, given, peers) for given in runs]
    if peers.leads:
        torch.save(found, file)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
