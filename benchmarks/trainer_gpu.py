"""The trainer on a GPU: step time beside the trainer of old, memory, and what share of the card's matrix rate it reaches.

    python -m benchmarks.trainer_gpu --json --out FILE

The model has the sizes of Qwen2.5-7B and random weights, made on the card: no files, no hub, no tokenizer. Base bfloat16, adapter
float32, rank 16. Times are of the clock between two moments at which the card had nothing left to do; medians.
The achieved share is of the rate at which this card multiplies two bfloat16 matrices of 8192 by 8192, measured here; what is
counted stands in `trainer_on_device`.
Every figure is printed as soon as it is taken, and the file is whole after each. A failed measurement prints its error, and the
rest goes on.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainer_cases import QWEN_7B, TINY, Case
from benchmarks.trainer_on_device import Bench, free_memory, matrix_rate, relative_error
from storage.gather import Batch
from training.policy import choose_device

SHAPES = {"7b": QWEN_7B, "tiny": TINY}
CASES = {
    "g8": Case(positions=16, forks=8),
    "three_level": Case(positions=3, powers=7, forks=6, rules=150, board=230, own=60),
}
SMALL_CASES = {
    "g8": Case(positions=2, forks=4, own=100),
    "three_level": Case(positions=2, powers=3, forks=2, rules=30, board=40, own=20),
}
"""Stand-ins that a CPU can do, to see that the script runs."""
BUDGETS = (2048, 4096, 8192, 16_384)
FEW = Case(positions=2, forks=8)
"""Rows on which packed and padded are compared."""


class Figures:
    """What was measured so far; says each thing at once."""

    def __init__(self, out: Path | None, limit_s: float) -> None:
        self.metrics: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self._out, self._ends = out, time.perf_counter() + limit_s

    def take(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Add the figures of `measure`, or what kept it from having any; nothing, if the time is over."""
        if time.perf_counter() > self._ends:
            self.failures[name] = "not reached in time"
        else:
            began = time.perf_counter()
            try:
                found = {f"{name}.{key}": value for key, value in measure().items()}
                self.metrics |= found
                self.say(**found, took_s=round(time.perf_counter() - began, 2))
            except Exception as error:
                # A figure that cannot be had must not cost the others: out of memory is the usual one.
                self.failures[name] = f"{type(error).__name__}: {error}"[:500]
        if name in self.failures:
            self.say(failed=name, because=self.failures[name])
        free_memory()
        self.save()

    def say(self, **figures: Any) -> None:
        """One line."""
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()

    def as_object(self) -> dict[str, Any]:
        """All of it."""
        return {"benchmark": "trainer_gpu", "metrics": self.metrics, "failures": self.failures}

    def save(self) -> None:
        """Write what there is."""
        if self._out is not None:
            self._out.write_text(json.dumps(self.as_object(), indent=1))


# -- all of it -------------------------------------------------------------------------------------------------------------


def bench_trainer_gpu(
    *,
    device: str = "cuda",
    shape: str = "7b",
    out: Path | None = None,
    limit_s: float = 340.0,
    repeats: int = 3,
    compiled: bool = False,
) -> Figures:
    """Measure; `shape` "tiny" is for seeing, even on a CPU, that everything runs.

    Raises:
        InputError: 'cuda' without a GPU.
    """
    choose_device(device)
    figures, where = Figures(out, limit_s), torch.device(device)
    cases = CASES if shape == "7b" else SMALL_CASES
    on_card = where.type == "cuda"
    figures.say(torch=torch.__version__, device=torch.cuda.get_device_name(where) if on_card else "cpu", shape=shape)
    figures.take("card", lambda: matrix_rate(where, 8192 if on_card else 512))
    rate = 1e12 * figures.metrics.get("card.matrix_tflops", float("nan"))
    made: list[Bench] = []

    def make() -> dict[str, float]:
        made.append(Bench(SHAPES[shape], where, torch.bfloat16))
        return {"parameters": float(sum(weight.numel() for weight in made[0].policy.model.parameters()))}

    figures.take("model", make)
    if made:
        _arms(figures, made[0], cases, rate, repeats=repeats, compiled=compiled)
    made.clear()
    free_memory()
    _exact_in_float32(figures, where)
    return figures


def _arms(figures: Figures, bench: Bench, cases: dict[str, Case], rate: float, *, repeats: int, compiled: bool) -> None:
    kinds = ("flex", "varlen", "dense") if bench.device.type == "cuda" else ("ranges", "dense")
    few = bench.batch(FEW if cases is CASES else cases["g8"])
    figures.take("agreement_bf16", lambda: agreement(bench, few, kinds))
    for name, case in cases.items():
        _case(figures, bench, name, bench.batch(case), few, kinds, rate, repeats)
    batch, best = bench.batch(cases["g8"]), quickest(figures, "g8", kinds)
    for budget in BUDGETS:
        how = {"attention": best, "token_budget": budget}
        figures.take(f"budget_{budget}", lambda how=how: bench.packed_figures(batch, rate, 2, **how))
    if compiled:
        figures.take("compiled", lambda: bench.packed_figures(batch, rate, 2, attention=best, compile=True))


def _case(
    figures: Figures, bench: Bench, name: str, batch: Batch, few: Batch, kinds: Sequence[str], rate: float, repeats: int
) -> None:
    """Every arm on one batch; `few` warms the old one up."""
    for kind in kinds:
        figures.take(f"{name}.{kind}", lambda kind=kind: bench.packed_figures(batch, rate, repeats, attention=kind))
    best = quickest(figures, name, kinds)
    how = {"attention": best, "recompute": True}
    figures.take(f"{name}.{best}_recompute", lambda: bench.packed_figures(batch, rate, repeats, **how))
    for arm, recompute in (("old", True), ("old_no_recompute", False)):
        step, warm_up = bench.old(batch, recompute=recompute), bench.old(few, recompute=recompute)
        figures.take(f"{name}.{arm}", lambda step=step, warm_up=warm_up: bench.figures(step, max(1, repeats - 1), warm_up))
    figures.take(f"{name}.speedup", lambda: speedups(figures.metrics, name, best))


def quickest(figures: Figures, name: str, kinds: Sequence[str]) -> str:
    """The attention with the shortest step."""
    return min(kinds, key=lambda kind: figures.metrics.get(f"{name}.{kind}.step_s", float("inf")))


def speedups(metrics: dict[str, Any], name: str, kind: str) -> dict[str, float]:
    """Seconds of the step of old over ours."""
    ours = metrics[f"{name}.{kind}.step_s"]
    arms = [arm for arm in ("old", "old_no_recompute") if f"{name}.{arm}.step_s" in metrics]
    return {f"{arm}_over_{kind}": metrics[f"{name}.{arm}.step_s"] / ours for arm in arms}


def agreement(bench: Bench, batch: Batch, kinds: Sequence[str]) -> dict[str, float]:
    """Loss and gradient of each packed attention against the padded path; what fails is infinitely far."""
    oracle_loss, oracle = bench.gradient(bench.ours(batch, layout="padded"))
    found = {}
    for kind in kinds:
        try:
            loss, gradient = bench.gradient(bench.ours(batch, attention=kind))
        except Exception as error:
            sys.stdout.write(f"{kind}: {type(error).__name__}: {error}\n")
            continue
        found[f"{kind}_loss_diff"] = abs(loss - oracle_loss)
        found[f"{kind}_grad_rel_error"] = relative_error(gradient, oracle)
    return found


def _exact_in_float32(figures: Figures, device: torch.device) -> None:
    """The tiny model in float32; flash, and so varlen, knows no float32."""
    kinds = ("flex", "dense") if device.type == "cuda" else ("ranges", "dense")

    def measure() -> dict[str, float]:
        bench = Bench(TINY, device, torch.float32)
        return agreement(bench, bench.batch(SMALL_CASES["three_level"]), kinds)

    figures.take("agreement_fp32", measure)


def main(words: Sequence[str] | None = None) -> None:
    """Measure as the words of the command line say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_gpu")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    parser.add_argument("--out", type=Path, help="file that holds all figures taken so far")
    parser.add_argument("--shape", choices=list(SHAPES), default="7b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit-s", type=float, default=340.0, help="nothing new is begun after so many seconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="also with torch.compile, which takes its time")
    given = parser.parse_args(words)
    figures = bench_trainer_gpu(
        device=given.device,
        shape=given.shape,
        out=given.out,
        limit_s=given.limit_s,
        repeats=given.repeats,
        compiled=given.compile,
    )
    if given.json:
        figures.say(**figures.as_object())


if __name__ == "__main__":
    main()
