"""`trainer`: the cost of our training step against the old one, and a check that packed and padded rows have the same gradient.

Measures rows of a laptop run, then synthetic rows. Arms alternate in one process on one thread, in CPU seconds; a figure is the
median ratio over the rounds, after a warm-up. An arm covers everything from a batch to its gradient (ours with planning, packing,
losses and metrics), without optimiser step, recomputation or KL divergence from the base. Exactness compares packed with padded
rows in float32. For a GPU use `entente smoke --only training-step`.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import Qwen3Config

from benchmarks.entente_run import short_run
from benchmarks.laptop_run import model_of, record_rows
from benchmarks.outcome import Outcome, Target, cpu_seconds
from benchmarks.padded_rows import differences
from benchmarks.trainer_arms import Steps, random_steps, update_rows
from benchmarks.trainer_cases import CASES, TINY, TINY_32K, Case, made_up_batch
from entente.decoding.architectures import read_architecture
from entente.decoding.codec import Codec
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.progress import reporter
from entente.training.first_guess import block_products
from entente.training.micro_batches import plan
from entente.training.policy import Policy
from entente.training.settings import CPU_TOKENS, TrainingSettings
from storage.gather import Batch

TARGETS = {
    "speedup_recorded": Target(at_least=5.0),
    "speedup_made_up_g6": Target(at_least=4.5),
    "speedup_made_up_g16": Target(at_least=7.0),
    "speedup_made_up_masked_32k": Target(at_least=13.0),
    "speedup_made_up_trie": Target(at_least=9.0),
    "loss_diff": Target(at_most=1e-6),
    "grad_rel_error": Target(at_most=1e-5),
    "planner_share": Target(at_most=0.03),
    "two_processes_over_one": Target(at_least=1.6),
    "rate_share": Target(at_least=0.8),
}
RECORDED = "recorded"
CHECKS = ("exactness", "planner")
PROCESSES = "two_processes"
"""Opt-in, because it needs two free cores."""


def check_wanted(only: Collection[str], model: str) -> None:
    """Raises InputError if a name in `only` is unknown, or `inference.model` is not the tiny one."""
    known = (RECORDED, *CASES, *CHECKS, PROCESSES)
    if unknown := sorted(set(only) - set(known)):
        raise InputError(f"The trainer benchmark measures no '{unknown[0]}', but {', '.join(known)}.")
    if model != "tiny" and (RECORDED in only or not only):
        raise InputError(
            f"Rows are recorded with inference.model 'tiny', not '{model}': leave it out of --config, or name others with --only."
        )


def bench_trainer(
    *,
    settings: RunSettings,
    arguments: Sequence[str] = (),
    repeats: int = 5,
    only: Collection[str] = (),
    seed: int = 0,
    model: Path | None = None,
) -> Outcome:
    """Measure with tiny models, or, with the folder of a `model`, only its `rate_figures`. `settings`, `arguments`: of the
    recorded run. `only`: "recorded", "two_processes", names of `CASES` and `CHECKS`; empty: all except "two_processes"."""
    if model is not None:
        with one_thread():
            metrics = rate_figures(model, repeats=repeats, seed=seed)
        return Outcome(benchmark=f"trainer, {model.name}", metrics=metrics, targets={"rate_share": TARGETS["rate_share"]})
    check_wanted(only, settings.inference.model)
    wanted = [name for name in (RECORDED, *CASES, *CHECKS, PROCESSES) if name in (only or (RECORDED, *CASES, *CHECKS))]
    metrics: dict[str, float] = {}
    with one_thread():
        for number, name in enumerate(wanted):
            reporter().stage(f"measuring {name}", number, len(wanted))
            if name == RECORDED:
                metrics |= recorded_figures(settings, arguments, repeats=repeats)
            elif name == PROCESSES:
                metrics |= two_process_figures(settings, arguments, repeats=repeats)
            elif name in CASES:
                metrics |= made_up_figures(name, repeats=repeats, seed=seed)
            elif name == "exactness":
                metrics |= exactness(Case(positions=3, forks=6, spread=0.5), TINY, seed=seed)
            else:
                metrics |= {"planner_share": planner_share(CASES["g6"], TINY, repeats=repeats, seed=seed)}
        reporter().stage("measuring", len(wanted), len(wanted))
    return Outcome(
        benchmark="trainer",
        metrics=metrics,
        targets={name: target for name, target in TARGETS.items() if name in metrics},
    )


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_s(work: Callable[[], object]) -> float:
    gc.collect()
    return cpu_seconds(work)


def recorded_figures(settings: RunSettings, arguments: Sequence[str], *, repeats: int) -> dict[str, float]:
    batch, advantages = record_rows(settings, arguments)
    batch = replace(batch, returns=advantages.astype(np.float64))
    training = settings.training.model_copy(update={"device": "cpu", "kl_weight": 0.0})
    steps = Steps(Policy(model_of(settings), training), training)
    return speedups(RECORDED, steps, batch, batch, repeats=repeats)


def two_process_figures(settings: RunSettings, arguments: Sequence[str], *, repeats: int) -> dict[str, float]:
    """Unique tokens per wall second of two trainer processes over one, each on one thread, without overlap with rollouts."""
    ratios = []
    for number in range(repeats):
        rates = dict[int, float]()
        for processes in (1, 2):
            words = ("--pipeline.buffer-depth", "0", "--training.processes", f"{processes}", "--training.threads", f"{processes}")
            with short_run(settings, arguments, 5, *words) as (run, _):
                rates[processes] = median(run.settled("train/unique_tokens_per_s"))
        ratios.append(rates[2] / rates[1])
        reporter().say(f"two processes, round {number + 1} of {repeats}: {rates[2]:,.0f} over {rates[1]:,.0f} unique tokens/s")
    return {"two_processes_over_one": median(ratios)}


def made_up_figures(name: str, *, repeats: int, seed: int) -> dict[str, float]:
    config = TINY_32K if name.endswith("32k") else TINY
    batch, warm_up = (
        made_up_batch(case, vocabulary=config.vocab_size, seed=seed) for case in (CASES[name], Case(positions=1, forks=2))
    )
    return speedups(f"made_up_{name}", random_steps(config), batch, warm_up, repeats=repeats)


def speedups(name: str, steps: Steps, batch: Batch, warm_up: Batch, *, repeats: int) -> dict[str, float]:
    """CPU seconds of the old step over ours, and the share of the batch's tokens that ours computes."""
    arms = {"ours": steps.ours(), "old": steps.old()}
    for step in arms.values():
        step(warm_up)
    ratios = []
    for number in range(repeats):
        spent = {arm: cpu_s(lambda arm=arm: arms[arm](batch)) for arm in arms}
        ratios.append(spent["old"] / spent["ours"])
        reporter().say(f"{name}, round {number + 1} of {repeats}: ours {spent['ours']:.2f} s, old {spent['old']:.2f} s")
    unique = unique_tokens(batch, update_rows(batch, steps.settings))
    return {f"speedup_{name}": median(ratios), f"unique_token_share_{name}": unique / len(batch.input_ids)}


def unique_tokens(batch: Batch, updates: Iterable[Sequence[int]]) -> int:
    return sum(micro.tokens for rows in updates for micro in plan(batch, rows, CPU_TOKENS))


def planner_share(case: Case, config: Qwen3Config, *, repeats: int, seed: int) -> float:
    batch, step, shares = made_up_batch(case, vocabulary=config.vocab_size, seed=seed), random_steps(config).ours(), []
    step(batch)
    for _ in range(repeats):
        step_s = cpu_s(lambda: step(batch))
        shares.append(cpu_s(lambda: plan(batch, range(case.rows), CPU_TOKENS)) / step_s)
    return median(shares)


def exactness(case: Case, config: Qwen3Config, *, seed: int) -> dict[str, float]:
    policy, batch = random_steps(config).policy, made_up_batch(case, vocabulary=config.vocab_size, seed=seed)
    loss, gradient = differences(policy, batch, range(case.rows))
    return {"loss_diff": loss, "grad_rel_error": gradient}


def rate_figures(model: Path, *, repeats: int, seed: int) -> dict[str, float]:
    """`trainer --model`: FLOPs utilisation of our step, relative to matrix products of the model's shapes on this machine.

        rate share = u (4 B + 6 A) / t  over  rate

        u   unique tokens of the step: forward, and backward to activations, through the base's linear layers (2 B FLOPs
            each); forward, and backward to activations and weights, of the adapter (2 A each)
        B   weights of the base's linear layers; A weights of the adapter; t CPU seconds of the step on one thread

    Synthetic rows: one position, seven powers, six forks each. Measurements of rate and step alternate; the products have as many
    rows as a micro-batch has tokens. Attention scores, norms, head and planning are not counted, so the maximum is below 1.
    """
    sizes, settings = read_architecture(model), TrainingSettings(device="cpu")
    batch = made_up_batch(CASES["trie"], vocabulary=Codec(model).vocabulary_size, seed=seed)
    steps = Steps(Policy(model, settings), settings)
    unique = unique_tokens(batch, update_rows(batch, settings))
    arithmetic = unique * (4 * sizes.linear_parameters + 6 * sizes.lora_parameters(settings.lora_rank))
    step, products, spent, rates = steps.ours(), block_products(sizes, rows=unique), [], []
    for number in range(repeats + 1):
        step_s, products_s = cpu_seconds(lambda: step(batch)), cpu_seconds(products)
        if number:  # the first warms up
            spent.append(step_s)
            rates.append(2.0 * unique * sizes.linear_parameters / sizes.layers / products_s)
            reporter().say(f"round {number} of {repeats}: {unique / step_s:,.0f} unique tokens a CPU second")
    share = median(arithmetic / seconds / rate for seconds, rate in zip(spent, rates, strict=True))
    return {
        "rate_share": share,
        "step_gflops": arithmetic / median(spent) / 1e9,
        "matrix_gflops": median(rates) / 1e9,
        "unique_tokens": float(unique),
        "unique_tokens_per_cpu_s": unique / median(spent),
    }
