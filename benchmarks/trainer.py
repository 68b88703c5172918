"""`trainer`: the cost of a training step beside that of the old trainer, and a check that packed and padded give one gradient.

Arms of a ratio take turns, in one process on one thread, in CPU seconds. A figure is the median of the rounds' ratios, after a
warm-up on part of the rows. Our arm holds all that makes a gradient of a batch: planning, packing, forwards, losses, gauges,
backwards. The old arm holds the same (`benchmarks/old_trainer.py`). The optimiser's step is the same in both and is in neither.
Exactness compares packed with padded, both ours, in float32, from one adapter. GPUs (`benchmarks/trainer_gpu.py`) and real text
are not measured here.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.old_trainer import OldTrainer
from benchmarks.outcome import Outcome, Target
from benchmarks.trainer_cases import CASES, MANY_SMALL, TINY, TINY_32K, Case, Shape, made_up_batch, model_of, stir_adapter
from benchmarks.trainer_on_device import gradient_of, relative_error
from benchmarks.trainer_resume import resume_equal_share
from storage.gather import Batch
from telemetry.errors import InputError
from telemetry.progress import reporter
from training.policy import Policy
from training.settings import CPU_TOKENS, TrainingSettings
from training.trie_plan import TriePlan, plan
from training.update import Updater

TARGETS = {
    "speedup_g2": Target(at_least=3.0),
    "speedup_g6": Target(at_least=8.5),
    "speedup_g8": Target(at_least=9.5),
    "speedup_g16": Target(at_least=12.5),
    "speedup_g6_no_recompute": Target(at_least=6.0),
    "speedup_g16_no_recompute": Target(at_least=9.5),
    "speedup_mixed": Target(at_least=8.0),
    "speedup_masked_32k": Target(at_least=23.0),
    "speedup_trie": Target(at_least=15.0),
    "loss_diff": Target(at_most=1e-6),
    "grad_rel_error": Target(at_most=1e-5),
    "microbatch_grad_rel_error": Target(at_most=1e-5),
    "resume_bitwise": Target(at_least=1.0),
    "saved_bytes_ratio_32k": Target(at_least=4.0),
    "planner_share": Target(at_most=0.03),
}
CHECKS = ("exactness", "microbatch", "saved_bytes", "planner", "resume")
"""What is measured beside the times of `CASES`."""
SMALL_BUDGET, LARGE_BUDGET = 300, 8192
"""Unique tokens of a micro-batch, where its size must not matter."""
ALSO_WITHOUT_RECOMPUTING = ("g6", "g16")


def check_wanted(only: Collection[str], repeats: int) -> None:
    """Refuse what cannot be measured.

    Raises:
        InputError: there is nothing to measure, or nothing of that name.
    """
    known = (*CASES, *CHECKS)
    if repeats < 1:
        raise InputError(f"There is nothing to measure in {repeats} repeats: at least 1.")
    if unknown := sorted(set(only) - set(known)):
        raise InputError(f"The trainer benchmark measures no '{unknown[0]}', but {', '.join(known)}.")


def bench_trainer(*, repeats: int = 5, only: Collection[str] = (), seed: int = 0) -> Outcome:
    """Measure on the tiny model.

    Args:
        only: names of `CASES` and `CHECKS`; all of them if none is given.

    Raises:
        InputError: there is nothing to measure, or nothing of that name.
    """
    check_wanted(only, repeats)
    wanted = [name for name in (*CASES, *CHECKS) if name in only or not only]
    metrics: dict[str, float] = {}
    with one_thread(), tempfile.TemporaryDirectory(prefix="entente-trainer-") as scratch:
        for number, name in enumerate(wanted):
            reporter().stage(f"measuring {name}", number, len(wanted))
            metrics |= _measured(name, Path(scratch), repeats=repeats, seed=seed)
        reporter().stage("measuring", len(wanted), len(wanted))
    return Outcome(
        benchmark="trainer",
        metrics=metrics,
        targets={name: target for name, target in TARGETS.items() if name in metrics},
    )


def _measured(name: str, scratch: Path, *, repeats: int, seed: int) -> dict[str, float]:
    if name in CASES:
        shape = TINY_32K if name.endswith("32k") else TINY
        return speedups(name, CASES[name], shape, repeats=repeats, seed=seed, no_recompute=name in ALSO_WITHOUT_RECOMPUTING)
    if name == "exactness":
        return exactness(CASES["mixed"], TINY, seed=seed)
    if name == "microbatch":
        return {"microbatch_grad_rel_error": budget_error(MANY_SMALL, TINY, seed=seed)}
    if name == "saved_bytes":
        return {"saved_bytes_ratio_32k": saved_bytes_ratio(Case(positions=1, forks=6), TINY_32K, seed=seed)}
    if name == "planner":
        return {"planner_share": planner_share(CASES["g6"], TINY, repeats=repeats, seed=seed)}
    return {"resume_bitwise": resume_equal_share(scratch)}


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- arms ------------------------------------------------------------------------------------------------------------------


def policy_of(shape: Shape, settings: TrainingSettings) -> Policy:
    """A policy of random weights whose adapter has left its start."""
    policy = Policy(model_of(shape), settings)
    stir_adapter(policy.parameters())
    return policy


def advantages_of(batch: Batch) -> np.ndarray:
    """float32 [rows]: made-up ones, since any serve; not zero, so that every row has a gradient."""
    return batch.returns.astype(np.float32)


class Ours:
    """The step of this project on one batch."""

    def __init__(self, shape: Shape, **settings: Any) -> None:
        self.settings = TrainingSettings(device="cpu", **settings)
        self.policy = policy_of(shape, self.settings)
        self._updater = Updater(self.policy, self.settings)

    def __call__(self, batch: Batch) -> float:
        """Forward and backward over all of `batch`, from no gradient; the loss."""
        self.policy.model.zero_grad(set_to_none=True)
        rows = list(range(len(batch.prompt_lens)))
        return sum(self._updater.accumulate(batch, rows, advantages_of(batch)).losses)

    def gradient(self) -> np.ndarray:
        """The gradient as one vector, in float64."""
        return gradient_of(self.policy)


class Old:
    """The step of old on one batch, on a model of its own."""

    def __init__(self, shape: Shape, *, recompute: bool, rows_each: int = 4) -> None:
        self.policy = policy_of(shape, TrainingSettings(device="cpu"))
        self._trainer = OldTrainer(self.policy.model, recompute=recompute, rows_each=rows_each)

    def __call__(self, batch: Batch) -> float:
        """Forward and backward over all of `batch`, from no gradient; the loss."""
        self.policy.model.zero_grad(set_to_none=True)
        return self._trainer.accumulate(batch, advantages_of(batch))


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of `work`, which pays for no one else's garbage."""
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


# -- times -----------------------------------------------------------------------------------------------------------------


def speedups(name: str, case: Case, shape: Shape, *, repeats: int, seed: int, no_recompute: bool = False) -> dict[str, float]:
    """CPU seconds of old over ours, and what share of the batch's tokens has to pass the model."""
    batch, warm_up = (made_up_batch(each, vocabulary=shape.vocabulary, seed=seed) for each in (case, Case(positions=1, forks=2)))
    arms: dict[str, Callable[[Batch], float]] = {"ours": Ours(shape), "old": Old(shape, recompute=True)}
    if no_recompute:
        arms["old_no_recompute"] = Old(shape, recompute=False)
    for arm in arms.values():
        arm(warm_up)
    rounds = []
    for number in range(repeats):
        rounds.append({arm: cpu_s(lambda arm=arm: arms[arm](batch)) for arm in arms})
        reporter().say(f"{name}, round {number + 1} of {repeats}: {_seconds(rounds[-1])}")
    metrics = {
        f"speedup_{name}": median(spent["old"] / spent["ours"] for spent in rounds),
        f"unique_token_share_{name}": planned(batch).unique_tokens / len(batch.input_ids),
    }
    if no_recompute:
        metrics[f"speedup_{name}_no_recompute"] = median(spent["old_no_recompute"] / spent["ours"] for spent in rounds)
    return metrics


def _seconds(spent: Mapping[str, float]) -> str:
    return ", ".join(f"{arm} {seconds:.2f} s" for arm, seconds in spent.items())


def planned(batch: Batch) -> TriePlan:
    """The plan of all its rows, as the step makes it on a CPU."""
    return plan(batch, range(len(batch.prompt_lens)), CPU_TOKENS)


def planner_share(case: Case, shape: Shape, *, repeats: int, seed: int) -> float:
    """CPU seconds of planning over those of the whole of our arm, which plans too."""
    batch, ours = made_up_batch(case, vocabulary=shape.vocabulary, seed=seed), Ours(shape)
    ours(batch)
    shares = []
    for _ in range(repeats):
        step_s = cpu_s(lambda: ours(batch))
        shares.append(cpu_s(lambda: planned(batch)) / step_s)
    return median(shares)


# -- exactness -------------------------------------------------------------------------------------------------------------


def exactness(case: Case, shape: Shape, *, seed: int) -> dict[str, float]:
    """Loss and gradient of the packed path against those of the padded one, in float32."""
    batch = made_up_batch(case, vocabulary=shape.vocabulary, seed=seed)
    packed, padded = Ours(shape, layout="packed"), Ours(shape, layout="padded")
    loss, oracle = packed(batch), padded(batch)
    return {"loss_diff": abs(loss - oracle), "grad_rel_error": relative_error(packed.gradient(), padded.gradient())}


def budget_error(case: Case, shape: Shape, *, seed: int) -> float:
    """Gradient in many micro-batches against that in one."""
    batch = made_up_batch(case, vocabulary=shape.vocabulary, seed=seed)
    small, large = Ours(shape, token_budget=SMALL_BUDGET), Ours(shape, token_budget=LARGE_BUDGET)
    small(batch)
    large(batch)
    return relative_error(small.gradient(), large.gradient())


# -- memory ----------------------------------------------------------------------------------------------------------------


def saved_bytes_ratio(case: Case, shape: Shape, *, seed: int) -> float:
    """Bytes that autograd keeps for the way back, old without recomputation over ours, all rows of `case` in one forward."""
    batch = made_up_batch(case, vocabulary=shape.vocabulary, seed=seed)
    old, ours = Old(shape, recompute=False, rows_each=case.rows), Ours(shape, token_budget=LARGE_BUDGET)
    ours(batch)  # the first step also checks itself, on rows of both layouts
    return saved_bytes(old.policy, lambda: old(batch)) / saved_bytes(ours.policy, lambda: ours(batch))


def saved_bytes(policy: Policy, work: Callable[[], object]) -> int:
    """Bytes of the distinct storages that `work` saves for backward, without the model's own."""
    own = {weight.untyped_storage().data_ptr() for weight in (*policy.model.parameters(), *policy.model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # held on to, so that no address comes twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(storage.nbytes() for storage in kept.values())
