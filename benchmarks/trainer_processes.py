"""Two trainer processes of one thread beside one: seconds of the clock for a step, and how far their gradients are apart.

Arms take turns, and a figure is the median of the rounds' ratios. Both arms start from a batch in the leader and end with its
gradient there, so the second has the sending of rows, weights, gradients and figures in it. `processes_speedup` is of the same
step. `processes_tokens` is of unique tokens a second, which counts the prompt prefixes that both processes compute. The machine
must have two cores that nothing else uses.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.trainer_arms import advantages_of, gradient_of, relative_error, update_rows
from benchmarks.trainer_cases import Case, Shape, made_up_batch, model_of, stir_adapter
from storage.gather import Batch
from telemetry.progress import reporter
from training.leader import gather_followers
from training.parallel import Peers
from training.policy import Policy
from training.settings import TrainingSettings
from training.update import Updater

LARGE = Shape(
    family="qwen3", hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocabulary=4096, tied=True
)
"""A model whose step is matrix products, for the most part."""
ROWS = Case(positions=6, powers=2, forks=6, rules=150, board=150, own=140, spread=0.3)


def made_up_model(folder: Path) -> Path:
    """Write a model of random weights as a follower needs it."""
    model_of(LARGE).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # part of a base's identity; made-up rows are ids already
    return folder


def process_figures(name: str, model: Path, training: TrainingSettings, batch: Batch, *, repeats: int) -> dict[str, float]:
    """Figures of a batch: `processes_<figure>_<name>`.

    Args:
        model: folder of the base model.
        batch: its returns are taken as advantages.
    """
    settings = training.model_copy(update={"device": "cpu", "processes": 2})
    with two_processes(model, settings) as peers:
        policy = Policy(model, settings)
        stir_adapter(policy.parameters())
        arms = {"alone": Updater(policy, settings), "together": Updater(policy, settings, peers)}
        found: dict[str, np.ndarray] = {}
        rounds = []
        for number in range(repeats + 1):
            took, tokens = {}, {}
            for arm, updater in arms.items():
                began, gradients, tokens[arm] = time.perf_counter(), [], 0
                for rows in update_rows(batch, settings):
                    tokens[arm] += updater.accumulate(batch, rows, advantages_of(batch)).unique_tokens
                    gradients.append(gradient_of(policy.parameters()))
                took[arm] = time.perf_counter() - began
                found[arm] = np.concatenate(gradients)
            if number:  # the first round checks layouts and makes kernels
                rounds.append((took["alone"] / took["together"], tokens["together"] / tokens["alone"]))
                reporter().say(
                    f"{name}, round {number} of {repeats}: {took['alone']:.2f} s alone, {took['together']:.2f} s by two"
                )
    return {
        f"processes_speedup_{name}": median(speedup for speedup, _ in rounds),
        f"processes_tokens_{name}": median(speedup * more for speedup, more in rounds),
        f"processes_grad_rel_error_{name}": relative_error(found["together"], found["alone"]),
    }


@contextmanager
def two_processes(model: Path, settings: TrainingSettings) -> Iterator[Peers]:
    """This process as the leader of one follower."""
    done = False

    def on_loss(sentence: str) -> None:
        if not done:
            reporter().say(sentence)
            os._exit(1)

    peers = gather_followers(model, settings, "bench", on_loss)
    assert peers is not None, "two processes are asked for"
    try:
        yield peers
    finally:
        done = True
        peers.broadcast(None)
        peers.leave()


def made_up_figures(folder: Path, *, repeats: int, seed: int) -> dict[str, float]:
    """Figures of made-up rows, with a model whose step is matrix products."""
    batch = made_up_batch(ROWS, vocabulary=LARGE.vocabulary, seed=seed)
    return process_figures("made_up", made_up_model(folder), TrainingSettings(), batch, repeats=repeats)
