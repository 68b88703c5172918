"""Time, memory and matrix rate of a training step, beside the step of the old trainer.

Times are medians of wall times between two moments at which the device was idle. The matrix rate is measured here, as a product
of two square bfloat16 matrices. Rows are made up (`benchmarks/trainer_cases.py`).

Operations are counted for each unique token, with N weights in the blocks' matrices, M in the adapter, A the width of all heads,
L layers and c visible tokens:

    forward 2 N + 2 M + 4 A L c        backward 2 N + 4 M + 8 A L c        (the forward of recomputation is not counted)

The base is frozen, so its weights have no gradient. The head is left out, because it is computed for legal tokens only.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.trainer_arms import Arms, Step
from benchmarks.trainer_cases import Case, Shape
from smoke.stage import say
from storage.gather import Batch
from training.packed_forward import attention_kinds
from training.trie_plan import plan

CASES = {
    "cuda": {
        "g8": Case(positions=16, forks=8),
        "three_level": Case(positions=3, powers=7, forks=6, rules=150, board=230, own=60),
    },
    "cpu": {
        "g8": Case(positions=2, forks=4, own=100),
        "three_level": Case(positions=2, powers=3, forks=2, rules=30, board=40, own=20),
    },
}
"""Batches by device; those of a CPU are small."""
BUDGETS = {"cuda": (2048, 4096, 8192, 16_384), "cpu": ()}
"""Unique tokens of a micro-batch that are compared; the batches of a CPU are too small to tell."""
BUDGET = 8192
"""Unique tokens of a micro-batch, except where BUDGETS are compared."""
FEW = Case(positions=2, forks=4, own=100)
"""Rows that warm up the old step."""


def kinds_on(device: torch.device) -> tuple[str, ...]:
    """Kinds of packed attention to try on a device, the product's own choice first."""
    more = ("varlen", "flex") if device.type == "cuda" else ()
    return tuple(dict.fromkeys((*attention_kinds("auto", device), *more)))


class Parts:
    """Figures of a stage part by part. If a part fails, its error is kept and the others are still measured.

    Attributes:
        figures: by name of the part and of the figure.
        failures: error by name of the part.
    """

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.failures: dict[str, str] = {}

    def add(self, name: str, measure: Callable[[], Mapping[str, float]]) -> None:
        """Add the figures of `measure` under `name`, or the error that it raised."""
        try:
            found = {f"{name}.{key}": float(value) for key, value in measure().items()}
            self.figures |= found
            say("  ".join(f"{key} {value:.4g}" for key, value in found.items()))
        except Exception as error:  # the usual one is out of memory
            self.failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            say(f"{name} failed: {self.failures[name]}")
        free_memory()


def measure_steps(
    arms: Arms, cases: Mapping[str, Case], kinds: Sequence[str], budgets: Sequence[int], rate: float, repeats: int
) -> Parts:
    """Steps of each case with each attention, with recomputation, and of the old trainer; then the budgets.

    Args:
        rate: matrix rate of the device, operations a second.
    """
    parts = Parts()
    for name, case in cases.items():
        _measure_case(parts, arms, name, case, kinds, rate, repeats)
    first = next(iter(cases))
    batch, best = arms.batch(cases[first]), fastest(parts.figures, first, kinds)
    for budget in budgets:
        parts.add(f"budget.{budget}", lambda budget=budget: packed_figures(arms, batch, rate, 2, budget=budget, attention=best))
    return parts


def _measure_case(parts: Parts, arms: Arms, name: str, case: Case, kinds: Sequence[str], rate: float, repeats: int) -> None:
    batch, old = arms.batch(case), arms.old(recompute=True, divergence=False)
    for kind in kinds:
        parts.add(f"{name}.{kind}", lambda kind=kind: packed_figures(arms, batch, rate, repeats, attention=kind))
    best = fastest(parts.figures, name, kinds)
    parts.add(f"{name}.recompute", lambda: packed_figures(arms, batch, rate, repeats, attention=best, recompute=True))
    parts.add(f"{name}.old", lambda: step_figures(arms, old, batch, 1, arms.batch(FEW)))


def fastest(figures: Mapping[str, float], name: str, kinds: Sequence[str]) -> str:
    """The attention with the shortest step."""
    return min(kinds, key=lambda kind: figures.get(f"{name}.{kind}.step_s", float("inf")))


def step_figures(arms: Arms, step: Step, batch: Batch, repeats: int, warm_up: Batch | None = None) -> dict[str, float]:
    """Seconds and peak memory of a step, after one step that warms up and compiles."""
    on_gpu = arms.device.type == "cuda"
    warm_up_s = wall_s(lambda: step(batch if warm_up is None else warm_up), arms.device)
    arms.policy.model.zero_grad(set_to_none=True)
    free_memory()
    before = torch.cuda.memory_allocated(arms.device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(arms.device)
    found = {"step_s": median(wall_s(lambda: step(batch), arms.device) for _ in range(repeats)), "warm_up_s": warm_up_s}
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(arms.device)
        found |= {"peak_gib": peak / 2**30, "peak_beyond_weights_gib": (peak - before) / 2**30}
    return found


def packed_figures(arms: Arms, batch: Batch, rate: float, repeats: int, *, budget: int = BUDGET, **how: Any) -> dict[str, float]:
    """`step_figures` of our step, with tokens a second and the share of the matrix rate `rate` (operations a second)."""
    found = step_figures(arms, arms.ours(token_budget=budget, **how), batch, repeats)
    planned = plan(batch, list(range(len(batch.prompt_lens))), budget)
    positions = np.concatenate([micro.positions for micro in planned.micro_batches])
    flops_per_s = step_flops(arms.shape, arms.rank, positions) / found["step_s"]
    return found | {
        "micro_batches": len(planned.micro_batches),
        "unique_tokens": planned.unique_tokens,
        "raw_tokens": planned.raw_tokens,
        "unique_tokens_per_s": planned.unique_tokens / found["step_s"],
        "raw_tokens_per_s": planned.raw_tokens / found["step_s"],
        "achieved_tflops": flops_per_s / 1e12,
        "matrix_rate_share": flops_per_s / rate,
    }


def step_flops(shape: Shape, rank: int, positions: np.ndarray) -> float:
    """Operations of a step on unique tokens at these positions, by the formula in the module's docstring."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = [(shape.hidden, width), (shape.hidden, kv_width), (shape.hidden, kv_width), (width, shape.hidden)]
    sides += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    weights = shape.layers * sum(inputs * outputs for inputs, outputs in sides)
    adapter = shape.layers * rank * sum(inputs + outputs for inputs, outputs in sides)
    visible = float((positions + 1).sum())
    return (4 * weights + 6 * adapter) * len(positions) + 12 * width * shape.layers * visible


def matrix_rate(device: torch.device, size: int) -> dict[str, float]:
    """Rate of a product of two square bfloat16 matrices, in 10^12 operations a second."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(one, other)

    multiply(5)
    return {"matrix_tflops": 2 * size**3 / median(wall_s(lambda: multiply(10), device) / 10 for _ in range(5)) / 1e12}


def wall_s(work: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of `work`, from an idle device to an idle device."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def free_memory() -> None:
    """Return unused memory to the GPU."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
