"""One model on one device, and what is asked of it there: steps of ours and of old, timed, with memory and operations counted.

The operations that are counted are, for each unique token (N weights of the blocks' matrices, M of the adapter, A width of all
heads, L layers, c tokens it sees):

    forward 2 N + 2 M + 4 A L c        backward 2 N + 4 M + 8 A L c        (with recomputation: one forward more, not counted)

The base is frozen, so its weights have no gradient; the head is left out, which is asked for legal tokens only.
"""

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.old_trainer import OldTrainer
from benchmarks.trainer_cases import Case, Shape, made_up_batch, model_of, stir_adapter
from storage.gather import Batch
from telemetry.errors import TrainingError
from training.policy import Policy
from training.settings import TrainingSettings
from training.trie_plan import plan
from training.update import Updater

BUDGET = 8192
"""Unique tokens of a micro-batch, where nothing else is said."""


def free_memory() -> None:
    """Give back the card's memory that nobody holds."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of the clock, from an idle device to an idle device."""
    wait_for(device)
    began = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began


def matrix_rate(device: torch.device, size: int) -> dict[str, float]:
    """Floating-point operations a second of a bfloat16 product of two square matrices."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(one, other)

    multiply(5)
    best = median(seconds(lambda: multiply(10), device) / 10 for _ in range(5))
    return {"matrix_tflops": 2 * size**3 / best / 1e12}


def step_flops(shape: Shape, rank: int, positions: np.ndarray) -> float:
    """Operations of a step on unique tokens at these positions, as the module's docstring counts them."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = [(shape.hidden, width), (shape.hidden, kv_width), (shape.hidden, kv_width), (width, shape.hidden)]
    sides += [(shape.hidden, shape.intermediate)] * 2 + [(shape.intermediate, shape.hidden)]
    weights = shape.layers * sum(inside * outside for inside, outside in sides)
    adapter = shape.layers * rank * sum(inside + outside for inside, outside in sides)
    seen = float((positions + 1).sum())
    return (4 * weights + 6 * adapter) * len(positions) + 12 * width * shape.layers * seen


class Bench:
    """One model on one device, and what is asked of it."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype, rank: int = 16) -> None:
        self.shape, self.device, self.rank = shape, device, rank
        self.settings = TrainingSettings(
            lora_rank=rank,
            device="cuda" if device.type == "cuda" else "cpu",
            dtype="bfloat16" if dtype == torch.bfloat16 else "float32",
        )
        self.policy = Policy(model_of(shape, device=str(device), dtype=dtype), self.settings)
        stir_adapter(self.policy.parameters())

    def batch(self, case: Case) -> Batch:
        """A batch of `case`."""
        return made_up_batch(case, vocabulary=self.shape.vocabulary)

    def ours(self, batch: Batch, **how: Any) -> Callable[[], float]:
        """A step of ours, by settings and `attention`; it fails where another path would be taken than was asked for."""
        attention = how.pop("attention", "auto")
        settings = self.settings.model_copy(update={"token_budget": BUDGET, **how})
        updater = Updater(self.policy, settings)
        if settings.compile:
            self.policy.compile_blocks()  # for good: whoever wants blocks that are not compiled comes before
        advantages, rows = batch.returns.astype(np.float32), list(range(len(batch.prompt_lens)))

        def step() -> float:
            self.policy.attention = attention
            self.policy.recompute(settings.recompute)
            self.policy.model.zero_grad(set_to_none=True)
            loss = sum(updater.accumulate(batch, rows, advantages).losses)
            if updater.layout.fallback or self.policy.attention != attention != "auto":
                raise TrainingError(updater.layout.fallback or f"'{attention}' did not pass its check, and gave way")
            return loss

        return step

    def old(self, batch: Batch, *, recompute: bool) -> Callable[[], float]:
        """A step of old."""
        trainer, advantages = OldTrainer(self.policy.model, recompute=recompute), batch.returns.astype(np.float32)

        def step() -> float:
            self.policy.recompute(False)  # it turns that on and off by itself
            self.policy.model.zero_grad(set_to_none=True)
            return trainer.accumulate(batch, advantages)

        return step

    def gradient(self, step: Callable[[], float]) -> tuple[float, np.ndarray]:
        """Loss and gradient of a step."""
        loss = step()
        return loss, gradient_of(self.policy)

    def figures(self, step: Callable[[], float], repeats: int, warm_up: Callable[[], float] | None = None) -> dict[str, float]:
        """Seconds and peak memory of a step, after one that warms up, and compiles."""
        warm_up_s, on_card = seconds(warm_up or step, self.device), self.device.type == "cuda"
        self.policy.model.zero_grad(set_to_none=True)
        free_memory()
        before = torch.cuda.memory_allocated(self.device) if on_card else 0
        if on_card:
            torch.cuda.reset_peak_memory_stats(self.device)
        spent = [seconds(step, self.device) for _ in range(repeats)]
        found = {"step_s": median(spent), "warm_up_s": warm_up_s}
        if on_card:
            peak = torch.cuda.max_memory_allocated(self.device)
            found |= {"peak_gib": peak / 2**30, "peak_beyond_weights_gib": (peak - before) / 2**30}
        return found

    def packed_figures(self, batch: Batch, rate: float, repeats: int, **how: Any) -> dict[str, float]:
        """As `figures`, of our step, with the tokens a second and the share of the matrix rate."""
        found = self.figures(self.ours(batch, **how), repeats)
        laid_out = plan(batch, list(range(len(batch.prompt_lens))), int(how.get("token_budget", BUDGET)))
        positions = np.concatenate([micro.positions for micro in laid_out.micro_batches])
        flops = step_flops(self.shape, self.rank, positions)
        return found | {
            "micro_batches": len(laid_out.micro_batches),
            "unique_tokens": laid_out.unique_tokens,
            "raw_tokens": laid_out.raw_tokens,
            "unique_tokens_per_s": laid_out.unique_tokens / found["step_s"],
            "raw_tokens_per_s": laid_out.raw_tokens / found["step_s"],
            "achieved_tflops": flops / found["step_s"] / 1e12,
            "matrix_rate_share": flops / found["step_s"] / rate,
        }


def gradient_of(policy: Policy) -> np.ndarray:
    """Its gradient as one vector, in float64."""
    gradients = [parameter.grad for parameter in policy.parameters()]
    return np.concatenate([gradient.double().flatten().cpu().numpy() for gradient in gradients if gradient is not None])


def relative_error(one: np.ndarray, other: np.ndarray) -> float:
    """Norm of the difference over the norm of `other`."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
