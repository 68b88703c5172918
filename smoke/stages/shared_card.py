"""Runs trainer and engine at the same time on one device: both fit beside each other, and how much each slows the other."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import psutil
import torch

from inference.memory_plan import size_text
from pipeline.threads import usable_cores
from smoke.engines import draw, engine_settings, illegal, make_requests, rate, running
from smoke.job import Found, Job, StageFailed, figures_so_far
from smoke.models import model_folder
from smoke.recommend import engine_share

PASSES = 3
"""Passes over the requests while the trainer trains."""


def run(job: Job) -> Found:
    """Start the trainer, then the engine in what is left, then let both work."""
    threads = max(1, usable_cores() // 2)
    torch.set_num_threads(threads)
    command = [sys.executable, "-P", "-m", "smoke.beside", "--folder", str(job.folder), "--device", job.device]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(
        [*command, "--model", job.model, "--shape", job.shape],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as trainer:
        try:
            return asyncio.run(_measure(job, trainer))
        finally:
            trainer.kill()


async def _measure(job: Job, trainer: "subprocess.Popen[str]") -> Found:
    model = model_folder(job)
    figures = await asyncio.to_thread(_answer, trainer)
    found = figures_so_far(job)
    share = engine_share(found.get("card", {}), found.get("training-step", {})) or 0.5
    settings = engine_settings(job, model, gpu_memory_share=share, max_sequences=32)
    requests = make_requests(model, 8 + 4 * settings.max_sequences, "shared")
    async with running(settings) as engine:
        figures["alone.decisions_per_s"] = await rate(engine, requests, "alone", 1, settings.max_sequences)
        _tell(trainer)
        beside = [
            await rate(engine, requests, f"beside-{number}", 2 + number, settings.max_sequences) for number in range(PASSES)
        ]
        figures["beside.decisions_per_s"] = sum(beside) / PASSES
        drawn = list(zip(requests, await draw(engine, requests), strict=True))
        _tell(trainer, ends=True)
        figures |= await asyncio.to_thread(_answer, trainer)
        figures["engine_bytes"] = _engine_bytes(job, share)
    if wrong := illegal(drawn):
        raise StageFailed(f"{wrong} completions are illegal while the trainer trains", figures=figures)
    slower = figures["alone.decisions_per_s"] / figures["beside.decisions_per_s"]
    trainer_size, engine_size = (size_text(int(figures[f"{who}_bytes"])) for who in ("trainer", "engine"))
    return Found(
        sentence=f"both fit: trainer {trainer_size}, engine {engine_size}; "
        f"beside each other drawing takes {slower:.2f} times its time alone and a training step "
        f"{figures['step_beside_s'] / figures['step_alone_s']:.2f} times",
        figures=figures,
    )


def _engine_bytes(job: Job, share: float) -> float:
    """Memory of the engine: its share of the card, or of its process's main memory."""
    if job.device == "cuda":
        return share * torch.cuda.mem_get_info()[1]
    return float(psutil.Process().memory_info().rss)


def _answer(trainer: "subprocess.Popen[str]") -> dict[str, Any]:
    assert trainer.stdout is not None
    line = trainer.stdout.readline()
    if not line:
        raise StageFailed(f"the trainer beside the engine ended with exit code {trainer.wait()}")
    return {name: float(value) for name, value in json.loads(line).items() if name != "ready"}


def _tell(trainer: "subprocess.Popen[str]", *, ends: bool = False) -> None:
    assert trainer.stdin is not None
    if ends:
        trainer.stdin.close()
    else:
        trainer.stdin.write("begin\n")
        trainer.stdin.flush()
