"""`trainer`: the cost of our training step beside the old one, and a check that packed and padded rows have one gradient.

Rows of a laptop run come first, then made-up ones. Arms take turns in one process on one thread, in CPU seconds; a figure is the
median of the rounds' ratios, after a warm-up. Each arm includes everything from a batch to its gradient: ours plans, packs,
computes losses and gauges. The optimiser's step is in neither arm. The old step neither recomputes activations nor computes the
divergence from the base, as ours by default. Figures named `_recompute` let it recompute; `_divergence` has it on both sides.
Exactness compares packed with padded rows of our step, in float32. `entente smoke --only training-step` measures on a GPU.
"""

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from benchmarks.laptop_run import record_rows
from benchmarks.old_way.learn import KL_WEIGHT
from benchmarks.outcome import Outcome, Target
from benchmarks.trainer_arms import Arms, Steps, relative_error, update_rows
from benchmarks.trainer_cases import CASES, MANY_SMALL, TINY, TINY_32K, Case, Shape
from pipeline.run_settings import RunSettings
from storage.gather import Batch
from storage.runs import MODEL_FOLDER
from telemetry.errors import InputError
from telemetry.progress import reporter
from training.policy import Policy
from training.settings import CPU_TOKENS
from training.tiny_model import make_tiny_model
from training.trie_plan import TriePlan, plan

TARGETS = {
    "speedup_recorded": Target(at_least=5.0),
    "speedup_made_up_g2": Target(at_least=1.9),
    "speedup_made_up_g6": Target(at_least=4.5),
    "speedup_made_up_g8": Target(at_least=5.5),
    "speedup_made_up_g16": Target(at_least=7.0),
    "speedup_made_up_mixed": Target(at_least=4.5),
    "speedup_made_up_masked_32k": Target(at_least=13.0),
    "speedup_made_up_trie": Target(at_least=9.0),
    "loss_diff": Target(at_most=1e-6),
    "grad_rel_error": Target(at_most=1e-5),
    "microbatch_grad_rel_error": Target(at_most=1e-5),
    "saved_bytes_ratio_32k": Target(at_least=4.0),
    "planner_share": Target(at_most=0.03),
}
RECORDED = "recorded"
"""The measurement on rows of a laptop run."""
CHECKS = ("exactness", "microbatch", "saved_bytes", "planner")
"""Measurements other than the times of a step."""
SMALL_BUDGET, LARGE_BUDGET = 300, 8192
"""Unique tokens of a micro-batch; its size must not change the gradient."""
ALSO_RECOMPUTED = ("g6", "g16")
"""Made-up cases that are also measured with an old step that recomputes."""


def check_wanted(only: Collection[str], repeats: int, model: str) -> None:
    """Check the arguments of `bench_trainer`.

    Args:
        model: `inference.model` of the run whose rows are recorded.

    Raises:
        InputError: `repeats` is below 1, a name in `only` is unknown, or rows would be recorded with a model that is not tiny.
    """
    known = (RECORDED, *CASES, *CHECKS)
    if repeats < 1:
        raise InputError(f"There is nothing to measure in {repeats} repeats: at least 1.")
    if unknown := sorted(set(only) - set(known)):
        raise InputError(f"The trainer benchmark measures no '{unknown[0]}', but {', '.join(known)}.")
    if model != "tiny" and (RECORDED in only or not only):
        raise InputError(
            f"Rows are recorded with inference.model 'tiny', not '{model}': leave it out of --config, or name others with --only."
        )


def bench_trainer(
    *, settings: RunSettings, arguments: Sequence[str] = (), repeats: int = 5, only: Collection[str] = (), seed: int = 0
) -> Outcome:
    """Measure with tiny models.

    Args:
        settings: settings of the run whose rows are recorded.
        arguments: arguments of `entente train` that give it `settings`.
        only: "recorded" and names of `CASES` and `CHECKS`; all of them if none is given.

    Raises:
        InputError: see `check_wanted`.
    """
    check_wanted(only, repeats, settings.inference.model)
    wanted = [name for name in (RECORDED, *CASES, *CHECKS) if name in only or not only]
    metrics: dict[str, float] = {}
    with one_thread():
        for number, name in enumerate(wanted):
            reporter().stage(f"measuring {name}", number, len(wanted))
            if name == RECORDED:
                metrics |= recorded_figures(settings, arguments, repeats=repeats)
            elif name in CASES:
                metrics |= made_up_figures(name, repeats=repeats, seed=seed)
            else:
                metrics |= _check(name, repeats=repeats, seed=seed)
        reporter().stage("measuring", len(wanted), len(wanted))
    return Outcome(
        benchmark="trainer",
        metrics=metrics,
        targets={name: target for name, target in TARGETS.items() if name in metrics},
    )


def _check(name: str, *, repeats: int, seed: int) -> dict[str, float]:
    if name == "exactness":
        return exactness(CASES["mixed"], TINY, seed=seed)
    if name == "microbatch":
        return {"microbatch_grad_rel_error": budget_error(MANY_SMALL, TINY, seed=seed)}
    if name == "saved_bytes":
        return {"saved_bytes_ratio_32k": saved_bytes_ratio(Case(positions=1, forks=6), TINY_32K, seed=seed)}
    return {"planner_share": planner_share(CASES["g6"], TINY, repeats=repeats, seed=seed)}


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


def recorded_figures(settings: RunSettings, arguments: Sequence[str], *, repeats: int) -> dict[str, float]:
    """The step on the rows that a laptop run trained on, with the run's tiny model, advantages and number of updates."""
    batch, advantages = record_rows(settings, arguments)
    batch = replace(batch, returns=advantages.astype(np.float64))
    model = make_tiny_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model, prompts=settings.prompts)
    training = settings.training.model_copy(update={"device": "cpu", "kl_weight": 0.0})
    steps = Steps(Policy(model, training), training)
    return speedups(RECORDED, steps, batch, batch, repeats=repeats, beside=("recompute", "divergence"))


def made_up_figures(name: str, *, repeats: int, seed: int) -> dict[str, float]:
    """The step on the made-up rows of `CASES[name]`."""
    arms = Arms(TINY_32K if name.endswith("32k") else TINY)
    batch, warm_up = arms.batch(CASES[name], seed), arms.batch(Case(positions=1, forks=2), seed)
    beside = ("recompute",) if name in ALSO_RECOMPUTED else ()
    return speedups(f"made_up_{name}", arms, batch, warm_up, repeats=repeats, beside=beside)


def speedups(
    name: str, steps: Steps, batch: Batch, warm_up: Batch, *, repeats: int, beside: Collection[str] = ()
) -> dict[str, float]:
    """CPU seconds of the old step over ours, and the share of the batch's tokens that our step computes.

    Args:
        beside: "recompute": also an old step that recomputes; "divergence": also both steps with the divergence from the base.
    """
    arms = {"ours": steps.ours(), "old": steps.old(recompute=False, divergence=False)}
    compared = {"": ("old", "ours")}
    if "recompute" in beside:
        arms["old_recompute"] = steps.old(recompute=True, divergence=False)
        compared["_recompute"] = ("old_recompute", "ours")
    if "divergence" in beside:
        arms["ours_divergence"] = steps.ours(kl_weight=KL_WEIGHT)
        arms["old_divergence"] = steps.old(recompute=False, divergence=True)
        compared["_divergence"] = ("old_divergence", "ours_divergence")
    for step in arms.values():
        step(warm_up)
    rounds = []
    for number in range(repeats):
        rounds.append({arm: cpu_s(lambda arm=arm: arms[arm](batch)) for arm in arms})
        seconds = ", ".join(f"{arm} {spent:.2f} s" for arm, spent in rounds[-1].items())
        reporter().say(f"{name}, round {number + 1} of {repeats}: {seconds}")
    ratios = {
        f"speedup_{name}{suffix}": median(spent[theirs] / spent[ours] for spent in rounds)
        for suffix, (theirs, ours) in compared.items()
    }
    unique = sum(plan(batch, rows, CPU_TOKENS).unique_tokens for rows in update_rows(batch, steps.settings))
    return ratios | {f"unique_token_share_{name}": unique / len(batch.input_ids)}


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
    old = arms.old(recompute=False, divergence=False, rows_each=case.rows)
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
