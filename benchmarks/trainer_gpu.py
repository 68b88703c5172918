"""The training step on a GPU: time beside the old step, memory, and the share of the GPU's matrix rate.

    python -m benchmarks.trainer_gpu --json --out FILE

The model has the shape of Qwen2.5-7B and random weights: base in bfloat16, adapter in float32 with rank 16. Times are medians of
wall times between two moments at which the GPU was idle. The matrix rate is measured here, as a product of two bfloat16 matrices
of 8192 by 8192. Every figure is printed and written to FILE at once. If a measurement fails, its error is printed and the next
one starts.

Operations are counted for each unique token, with N weights in the blocks' matrices, M in the adapter, A the width of all heads,
L layers and c visible tokens:

    forward 2 N + 2 M + 4 A L c        backward 2 N + 4 M + 8 A L c        (the forward of recomputation is not counted)

The base is frozen, so its weights have no gradient. The head is left out, because it is computed for legal tokens only.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.trainer_arms import Arms, Step, relative_error
from benchmarks.trainer_cases import QWEN_7B, TINY, Case, Shape
from storage.gather import Batch
from training.policy import choose_device
from training.trie_plan import plan

SHAPES = {"7b": QWEN_7B, "tiny": TINY}
CASES = {
    "g8": Case(positions=16, forks=8),
    "three_level": Case(positions=3, powers=7, forks=6, rules=150, board=230, own=60),
}
SMALL_CASES = {
    "g8": Case(positions=2, forks=4, own=100),
    "three_level": Case(positions=2, powers=3, forks=2, rules=30, board=40, own=20),
}
"""Cases for the tiny shape: a CPU can compute them, which shows that the program runs."""
BUDGETS = (2048, 4096, 8192, 16_384)
BUDGET = 8192
"""Unique tokens of a micro-batch, except where BUDGETS are compared."""
FEW = Case(positions=2, forks=8)
"""Rows on which packed and padded are compared, and which warm up the old step."""


class Figures:
    """The figures so far; each is printed and stored at once."""

    def __init__(self, out: Path | None) -> None:
        self.metrics: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._out = out

    def add(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Add the figures of `measure` under `name`, or the error that it raised."""
        try:
            found = {f"{name}.{key}": value for key, value in measure().items()}
            self.metrics |= found
            print_line(found)
        except Exception as error:
            # The other figures are still measured. The usual error is out of memory.
            self.failures[name] = f"{type(error).__name__}: {error}"[:500]
            print_line({"failed": name, "because": self.failures[name]})
        free_memory()
        if self._out is not None:
            self._out.write_text(json.dumps(self.as_object(), indent=1))

    def as_object(self) -> dict[str, Any]:
        """All figures and failures."""
        return {"benchmark": "trainer_gpu", "metrics": self.metrics, "failures": self.failures}


def bench_trainer_gpu(*, device: str = "cuda", shape: str = "7b", out: Path | None = None, repeats: int = 3) -> Figures:
    """Measure. The shape "tiny" shows, even on a CPU, that everything runs.

    Raises:
        InputError: 'cuda' without a GPU.
    """
    choose_device(device)
    figures, where = Figures(out), torch.device(device)
    on_gpu, cases = where.type == "cuda", CASES if shape == "7b" else SMALL_CASES
    print_line({"torch": torch.__version__, "device": torch.cuda.get_device_name(where) if on_gpu else "cpu", "shape": shape})
    figures.add("card", lambda: matrix_rate(where, 8192 if on_gpu else 512))
    rate = 1e12 * figures.metrics.get("card.matrix_tflops", float("nan"))
    made: list[Arms] = []

    def make() -> dict[str, float]:
        made.append(Arms(SHAPES[shape], where, torch.bfloat16))
        return {"parameters": float(sum(weight.numel() for weight in made[0].policy.model.parameters()))}

    figures.add("model", make)
    if made:
        kinds = ("flex", "varlen", "dense") if on_gpu else ("ranges", "dense")
        few = made[0].batch(FEW if cases is CASES else cases["g8"])
        figures.add("agreement_bf16", lambda: agreement(made[0], few, kinds))
        for name, case in cases.items():
            _measure_case(figures, made[0], name, case, few, kinds, rate, repeats)
        batch, best = made[0].batch(cases["g8"]), fastest(figures, "g8", kinds)
        for budget in BUDGETS:
            figures.add(
                f"budget_{budget}", lambda budget=budget: packed_figures(made[0], batch, rate, 2, budget=budget, attention=best)
            )
    made.clear()
    free_memory()

    def exact() -> dict[str, float]:  # varlen is flash attention, which has no float32
        arms = Arms(TINY, where)
        return agreement(arms, arms.batch(SMALL_CASES["three_level"]), ("flex", "dense") if on_gpu else ("ranges", "dense"))

    figures.add("agreement_fp32", exact)
    return figures


def _measure_case(
    figures: Figures, arms: Arms, name: str, case: Case, few: Batch, kinds: Sequence[str], rate: float, repeats: int
) -> None:
    """Every arm on one batch; `few` warms up the old step."""
    batch = arms.batch(case)
    for kind in kinds:
        figures.add(f"{name}.{kind}", lambda kind=kind: packed_figures(arms, batch, rate, repeats, attention=kind))
    best = fastest(figures, name, kinds)
    figures.add(f"{name}.{best}_recompute", lambda: packed_figures(arms, batch, rate, repeats, attention=best, recompute=True))
    for arm, recompute in (("old", True), ("old_no_recompute", False)):
        step = arms.old(recompute=recompute)
        figures.add(f"{name}.{arm}", lambda step=step: step_figures(arms, step, batch, max(1, repeats - 1), few))

    def speedups() -> dict[str, float]:
        old = {arm: figures.metrics.get(f"{name}.{arm}.step_s") for arm in ("old", "old_no_recompute")}
        ours = figures.metrics[f"{name}.{best}.step_s"]
        return {f"{arm}_over_{best}": seconds / ours for arm, seconds in old.items() if seconds is not None}

    figures.add(f"{name}.speedup", speedups)


def fastest(figures: Figures, name: str, kinds: Sequence[str]) -> str:
    """The attention with the shortest step."""
    return min(kinds, key=lambda kind: figures.metrics.get(f"{name}.{kind}.step_s", float("inf")))


def agreement(arms: Arms, batch: Batch, kinds: Sequence[str]) -> dict[str, float]:
    """Differences of loss and gradient between each packed attention and padded rows; an attention that fails is left out."""
    expected_loss, expected = arms.loss_and_gradient(arms.ours(layout="padded", token_budget=BUDGET), batch)
    found = {}
    for kind in kinds:
        try:
            loss, gradient = arms.loss_and_gradient(arms.ours(attention=kind, token_budget=BUDGET), batch)
        except Exception as error:
            print_line({"failed": kind, "because": f"{type(error).__name__}: {error}"})
            continue
        found |= {f"{kind}_loss_diff": abs(loss - expected_loss), f"{kind}_grad_rel_error": relative_error(gradient, expected)}
    return found


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


def print_line(figures: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> None:
    """Measure as the command line `words` say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_gpu")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    parser.add_argument("--out", type=Path, help="file for the figures so far")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(words)
    figures = bench_trainer_gpu(device=given.device, shape=given.shape, out=given.out, repeats=given.repeats)
    if given.json:
        print_line(figures.as_object())


if __name__ == "__main__":
    main()
