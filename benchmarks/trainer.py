"""`trainer`: the cost of our training step beside the old one, and a check that packed and padded rows have one gradient.

Arms take turns in one process on one thread, in CPU seconds; a figure is the median of the rounds' ratios, after a warm-up. Each
arm includes everything from a batch to its gradient: ours plans, packs, computes losses and gauges. The optimiser's step is in
neither arm. Exactness compares packed with padded rows of our step, in float32. `benchmarks/trainer_gpu.py` measures on a GPU.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.outcome import Outcome, Target
from benchmarks.trainer_arms import Arms, relative_error
from benchmarks.trainer_cases import CASES, MANY_SMALL, TINY, TINY_32K, Case, Shape
from benchmarks.trainer_resume import resume_equal_share
from storage.gather import Batch
from telemetry.errors import InputError
from telemetry.progress import reporter
from training.policy import Policy
from training.settings import CPU_TOKENS
from training.trie_plan import TriePlan, plan

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
"""Measurements other than the times of `CASES`."""
SMALL_BUDGET, LARGE_BUDGET = 300, 8192
"""Unique tokens of a micro-batch; its size must not change the gradient."""
ALSO_WITHOUT_RECOMPUTING = ("g6", "g16")


def check_wanted(only: Collection[str], repeats: int) -> None:
    """Check the arguments of `bench_trainer`.

    Raises:
        InputError: `repeats` is below 1, or a name in `only` is unknown.
    """
    known = (*CASES, *CHECKS)
    if repeats < 1:
        raise InputError(f"There is nothing to measure in {repeats} repeats: at least 1.")
    if unknown := sorted(set(only) - set(known)):
        raise InputError(f"The trainer benchmark measures no '{unknown[0]}', but {', '.join(known)}.")


def bench_trainer(*, repeats: int = 5, only: Collection[str] = (), seed: int = 0) -> Outcome:
    """Measure with the tiny model.

    Args:
        only: names of `CASES` and `CHECKS`; all of them if none is given.

    Raises:
        InputError: `repeats` is below 1, or a name in `only` is unknown.
    """
    check_wanted(only, repeats)
    wanted = [name for name in (*CASES, *CHECKS) if name in only or not only]
    metrics: dict[str, float] = {}
    with one_thread(), tempfile.TemporaryDirectory(prefix="entente-trainer-") as scratch:
        for number, name in enumerate(wanted):
            reporter().stage(f"measuring {name}", number, len(wanted))
            metrics |= _measure_one(name, Path(scratch), repeats=repeats, seed=seed)
        reporter().stage("measuring", len(wanted), len(wanted))
    return Outcome(
        benchmark="trainer",
        metrics=metrics,
        targets={name: target for name, target in TARGETS.items() if name in metrics},
    )


def _measure_one(name: str, scratch: Path, *, repeats: int, seed: int) -> dict[str, float]:
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
    """Limit torch to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of `work`, without collecting earlier garbage."""
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


def speedups(name: str, case: Case, shape: Shape, *, repeats: int, seed: int, no_recompute: bool = False) -> dict[str, float]:
    """CPU seconds of the old step over ours, and the share of the batch's tokens that our step computes."""
    arms = Arms(shape)
    batch, warm_up = arms.batch(case, seed), arms.batch(Case(positions=1, forks=2), seed)
    steps = {"ours": arms.ours(), "old": arms.old(recompute=True)}
    if no_recompute:
        steps["old_no_recompute"] = arms.old(recompute=False)
    for step in steps.values():
        step(warm_up)
    rounds = []
    for number in range(repeats):
        rounds.append({arm: cpu_s(lambda arm=arm: steps[arm](batch)) for arm in steps})
        seconds = ", ".join(f"{arm} {spent:.2f} s" for arm, spent in rounds[-1].items())
        reporter().say(f"{name}, round {number + 1} of {repeats}: {seconds}")
    metrics = {
        f"speedup_{name}": median(spent["old"] / spent["ours"] for spent in rounds),
        f"unique_token_share_{name}": plan_batch(batch).unique_tokens / len(batch.input_ids),
    }
    if no_recompute:
        metrics[f"speedup_{name}_no_recompute"] = median(spent["old_no_recompute"] / spent["ours"] for spent in rounds)
    return metrics


def plan_batch(batch: Batch) -> TriePlan:
    """The plan of all rows, as our step makes it on a CPU."""
    return plan(batch, range(len(batch.prompt_lens)), CPU_TOKENS)


def planner_share(case: Case, shape: Shape, *, repeats: int, seed: int) -> float:
    """CPU seconds of planning over those of our whole step."""
    arms = Arms(shape)
    batch, step, shares = arms.batch(case, seed), arms.ours(), []
    step(batch)
    for _ in range(repeats):
        step_s = cpu_s(lambda: step(batch))
        shares.append(cpu_s(lambda: plan_batch(batch)) / step_s)
    return median(shares)


def exactness(case: Case, shape: Shape, *, seed: int) -> dict[str, float]:
    """Differences of loss and gradient between packed and padded rows, in float32."""
    arms = Arms(shape)
    loss, gradient = arms.loss_and_gradient(arms.ours(layout="packed"), batch := arms.batch(case, seed))
    expected_loss, expected = arms.loss_and_gradient(arms.ours(layout="padded"), batch)
    return {"loss_diff": abs(loss - expected_loss), "grad_rel_error": relative_error(gradient, expected)}


def budget_error(case: Case, shape: Shape, *, seed: int) -> float:
    """Relative difference between the gradients of many micro-batches and of one."""
    arms = Arms(shape)
    batch = arms.batch(case, seed)
    small, large = (arms.loss_and_gradient(arms.ours(token_budget=size), batch)[1] for size in (SMALL_BUDGET, LARGE_BUDGET))
    return relative_error(small, large)


def saved_bytes_ratio(case: Case, shape: Shape, *, seed: int) -> float:
    """Bytes that autograd keeps for backward: the old step without recomputation over ours, all rows in one forward."""
    arms = Arms(shape)
    batch, ours = arms.batch(case, seed), arms.ours(token_budget=LARGE_BUDGET)
    old = arms.old(recompute=False, rows_each=case.rows)
    ours(batch)  # the first step also compares both layouts
    return saved_bytes(arms.policy, lambda: old(batch)) / saved_bytes(arms.policy, lambda: ours(batch))


def saved_bytes(policy: Policy, work: Callable[[], object]) -> int:
    """Bytes of the distinct storages that `work` saves for backward, without the model's own."""
    own = {weight.untyped_storage().data_ptr() for weight in (*policy.model.parameters(), *policy.model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(storage.nbytes() for storage in kept.values())
