"""What each process of the data-parallel tests runs, under torchrun or alone: two updates of a small model.

python parallel_worker.py FILE
"""

import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.trainer_cases import Case, Shape, made_up_batch, model_of, stir_adapter
from training.parallel import follow, join_peers
from training.policy import Policy
from training.settings import TrainingSettings
from training.update import Updater

SHAPE = Shape(family="qwen3", hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=96, vocabulary=512)
CASE = Case(positions=5, forks=3, own=30, completion=12, spread=0.4)


def main(file: Path) -> None:
    """Two updates, the second on weights that the first one moved."""
    torch.set_num_threads(1)
    settings = TrainingSettings(device="cpu", learning_rate=1e-2, updates_per_step=2, kl_weight=0.05, token_budget=256)
    peers = join_peers(torch.device("cpu"))
    policy = Policy(model_of(SHAPE), settings)
    # Followers begin elsewhere: they must take the leader's weights.
    stir_adapter(policy.parameters(), seed=1 if peers is None or peers.leads else 2)
    updater = Updater(policy, settings, peers)
    if peers is not None and not peers.leads:
        follow(peers, policy.parameters(), updater.gradient)
    else:
        found = {"losses": [], "gradients": [], "tokens": []}
        for update in updater.updates(made_up_batch(CASE, vocabulary=SHAPE.vocabulary)):
            found["losses"].append(update.outcome.loss)
            found["gradients"].append(np.concatenate([weight.grad.flatten().numpy() for weight in policy.parameters()]))
            found["tokens"].append(len(update.gauges.log_ratio))
        found["weights"] = [weight.detach().clone() for weight in policy.parameters()]
        torch.save(found, file)
        if peers is not None:
            peers.broadcast(None)
    if peers is not None:
        peers.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
