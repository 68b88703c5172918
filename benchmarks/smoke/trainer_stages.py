"""Smoke test stages of the trainer: the device, a training step, and a short run that compares trainer and engine."""

import gc
import json
import shutil
import time
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.entente_run import run_entente
from benchmarks.padded_rows import differences, flex_differences, tolerances
from benchmarks.smoke.engine_stages import RANK, TINY, model_folder
from benchmarks.smoke.job import Job, StageFailed, StagePass, figures_so_far
from benchmarks.smoke.recommend import as_toml, base_preset, model_advice, recommend, takes_flex
from benchmarks.trainer_arms import Steps
from benchmarks.trainer_cases import Case, made_up_batch
from entente.decoding.model_files import read_config
from entente.inference.engine_cards import vllm_build
from entente.inference.memory_plan import size_text
from entente.records.policy_version import ADAPTER_WEIGHTS
from entente.settings.layers import preset_names
from entente.telemetry.cards import check_visible, driver_problem, torch_cuda, visible_cards
from entente.telemetry.machine import usable_cores
from entente.training.micro_batches import plan
from entente.training.packed_attention import use_packed_attention
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from storage.gather import Batch
from storage.runs import RunPaths

CASES = {"cuda": Case(positions=48, forks=8), "cpu": Case(positions=2, forks=4, own=100)}
"""On a card three times the largest budget: with fewer the last micro-batch is a rest, and a large budget is never full."""
BUDGETS = {"cuda": (2048, 4096, 8192), "cpu": (2048,)}
STEPS = 3
_LIMIT_S = 3000.0
_SMALL = """
steps = {steps}
seed = 13
[cache]
train_snapshots = 16
held_out_snapshots = 8
[rollouts]
start_groups = {groups}
forks_per_group = {groups}
[pipeline]
buffer_depth = 1
[evaluation]
positions = 2
[telemetry]
wandb = "disabled"
report = false
"""
"""Overrides of the recommended settings: a run with few rows. Rollouts overlap with training."""


def card(job: Job) -> StagePass:
    if job.device == "cpu":
        memory, device, size = psutil.virtual_memory(), torch.device("cpu"), 512
        free, total, name = memory.available, memory.total, f"a CPU with {usable_cores()} cores"
    else:
        check_visible()
        if not (cards := visible_cards()):
            raise StageFailed("NVML shows no card to this process", "CUDA_VISIBLE_DEVICES, and `nvidia-smi`")
        if problem := driver_problem(cards[0].driver, torch_cuda()):
            raise StageFailed(*problem)
        if not torch.cuda.is_available():
            raise StageFailed(
                f"the driver shows {cards[0].text}, but torch {torch.__version__} cannot use it", "`entente doctor`"
            )
        if vllm_build() == "cpu":
            raise StageFailed("the installed vLLM runs on CPUs only", "`make setup` on this machine")
        device, size, name = torch.device("cuda", 0), 8192, f"{cards[0].name}, driver {cards[0].driver}"
        free, total = torch.cuda.mem_get_info(device)
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = median(wall_s(lambda: torch.mm(one, one), device) for _ in range(10))
    return StagePass(
        sentence=f"{name}, {size_text(free)} of {size_text(total)} free, torch {torch.__version__}",
        figures={"free_bytes": free, "total_bytes": total, "matrix_tflops": 2 * size**3 / seconds / 1e12},
    )


def attention(job: Job) -> StagePass:
    """Gradient and time of flex_attention beside those of the ranges."""
    if job.device == "cpu":
        return StagePass(sentence="packed rows attend by ranges, because flex_attention has no gradient on a CPU")
    try:
        return compare_attentions(job, recompute=False)
    except torch.OutOfMemoryError:
        return compare_attentions(job, recompute=True)


def compare_attentions(job: Job, *, recompute: bool) -> StagePass:
    step, policy, batch = made_up_step(job, recompute=recompute)
    budget, config = BUDGETS[job.device][0], policy.model.config
    loss, gradient = flex_differences(policy, batch, range(len(batch.prompt_lens)), budget)
    loss_allowed, gradient_allowed = tolerances(policy, batch, few_rows(batch))
    seconds = dict[str, float]()
    for kind in ("ranges", "flex"):
        use_packed_attention(config, kind)
        seconds[f"{kind}_s"], _ = measured(lambda: step(budget), policy.device)
    agrees = loss <= loss_allowed and gradient <= gradient_allowed
    figures = {"agrees": float(agrees), "loss_difference": loss, "gradient_difference": gradient, **seconds}
    return StagePass(
        sentence=f"flex_attention {'agrees with' if agrees else 'DIFFERS from'} the ranges, the gradient by {gradient:.2g} "
        f"({gradient_allowed:.2g} allowed); a step takes {seconds['flex_s']:.2f} s with it, {seconds['ranges_s']:.2f} s with "
        f"ranges: a run takes {'flex' if takes_flex(figures) else 'ranges'}",
        figures=figures,
    )


def training_step(job: Job) -> StagePass:
    """Time and memory of a step by token budget; recomputes if none fits without. Fails if packed and padded rows differ."""
    figures, misfit = try_budgets(job, recompute=False)
    if not figures:
        figures, misfit = try_budgets(job, recompute=True)
    if not figures:
        raise StageFailed(misfit, "a smaller model, or a card with more memory")
    best = max(BUDGETS[job.device], key=lambda budget: figures.get(f"tokens_per_s.{budget}", 0.0))
    peak = f", {figures[f'peak_gib.{best}']:.1f} GiB at most" if job.device == "cuda" else ""
    return StagePass(
        sentence=f"packed attention, which agrees with padded rows, trains {figures[f'tokens_per_s.{best}']:,.0f} unique "
        f"tokens/s{peak}{misfit and '; ' + misfit}",
        figures=figures,
    )


def try_budgets(job: Job, *, recompute: bool) -> tuple[dict[str, float], str]:
    """Figures of each budget that fits, and a sentence on the first that does not."""
    figures = dict[str, float]()
    step, policy, batch = made_up_step(job, recompute=recompute)
    for budget in BUDGETS[job.device]:
        try:
            if not figures:
                compare_with_padded(policy, batch)
            seconds, peak = measured(lambda budget=budget: step(budget), policy.device)
        except torch.OutOfMemoryError:
            how = "even with recomputation" if recompute else "without recomputation"
            return figures, f"a budget of {budget} tokens does not fit {how}"
        unique = sum(micro.tokens for micro in plan(batch, range(len(batch.prompt_lens)), budget))
        figures |= {f"step_s.{budget}": seconds, f"tokens_per_s.{budget}": unique / seconds, f"peak_gib.{budget}": peak}
        figures["recompute"] = float(recompute)
    return figures, ""


def compare_with_padded(policy: Policy, batch: Batch) -> None:
    rows = few_rows(batch)
    loss, gradient = differences(policy, batch, rows)
    loss_allowed, gradient_allowed = tolerances(policy, batch, rows)
    if not (loss <= loss_allowed and gradient <= gradient_allowed):
        raise StageFailed(
            f"packed rows differ from padded ones: the loss by {loss:.2g} nats ({loss_allowed:.2g} allowed) and the gradient by "
            f"{gradient:.2g} ({gradient_allowed:.2g} allowed)",
            "another release of torch or transformers: training on this card is not correct",
        )


def few_rows(batch: Batch) -> list[int]:
    """For padded rows: the first three, which share a prompt, and the last, which does not."""
    return [0, 1, 2, len(batch.prompt_lens) - 1]


def made_up_step(job: Job, *, recompute: bool) -> tuple[Any, Policy, Batch]:
    gc.collect()  # an earlier policy
    flex = takes_flex(figures_so_far(job).get("attention", {}))
    settings = TrainingSettings(lora_rank=RANK, device=job.device, dtype=job.dtype, attention="flex" if flex else "ranges")
    model = model_folder(job)
    policy = Policy(model, settings)
    steps, batch = Steps(policy, settings), made_up_batch(CASES[job.device], vocabulary=int(read_config(model)["vocab_size"]))
    return lambda budget: steps.ours(token_budget=budget, gradient_checkpointing=recompute)(batch), policy, batch


def measured(work: Any, device: torch.device) -> tuple[float, float]:
    """Median seconds of `work` after a warm-up, and its peak memory in GiB on a card, else 0."""
    work()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = median(wall_s(work, device) for _ in range(3))
    return seconds, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def wall_s(work: Any, device: torch.device) -> float:
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def steps(job: Job) -> StagePass:
    """`entente train` does three steps with the recommended settings, and every version has a different adapter."""
    shutil.rmtree(job.runs / "steps", ignore_errors=True)
    run = run_entente(_arguments(job), job.runs, "steps", timeout_s=_LIMIT_S, alone_in=job.folder)
    if run.summary["steps"] != STEPS or run.summary["orders_rejected"]:
        raise StageFailed(f"{run.summary['steps']} of {STEPS} steps, {run.summary['orders_rejected']} orders were rejected")
    paths = RunPaths(job.runs / "steps")
    if len({(paths.adapter(version) / ADAPTER_WEIGHTS).read_bytes() for version in range(1, STEPS + 1)}) < STEPS:
        raise StageFailed("a step did not change the adapter", "training.learning_rate")
    figures = {"step_s": median(run.settled("time/step_s")), "wall_s": float(run.summary["wall_s"])}
    return StagePass(
        sentence=f"{STEPS} steps in {figures['wall_s']:.0f} s, a step in {figures['step_s']:.1f} s once warm", figures=figures
    )


def _arguments(job: Job) -> list[str]:
    figures, advised, small = figures_so_far(job), job.folder / "advised.toml", job.folder / "small.toml"
    advised.write_text(as_toml([*model_advice(job), *recommend(job.device, figures)], "from the previous stages"))
    recipe = "".join(f"{name} = {json.dumps(value)}\n" for name, value in TINY.model_dump().items())
    small.write_text(_SMALL.format(steps=STEPS, groups=8 if job.device == "cuda" else 4) + f"[tiny_model]\n{recipe}")
    preset = base_preset(preset_names(), figures.get("card", {}), job.device)
    return ["--preset", preset, "--config", str(advised), "--config", str(small)]
