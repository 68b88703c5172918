"""An inference worker behind HTTP: beside an engine in this process, and the CPU time of its client and its own in rollouts.

The worker is `entente serve` in a process of its own. On a core of its own, requests are compared by wall time.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.decode_cases import made_up_prompt
from benchmarks.entente_run import tree_cpu_s
from benchmarks.played_steps import RunInputs, play_step
from decoding.model_files import model_fingerprint
from inference.engine import Engine
from inference.settings import InferenceSettings
from inference.warm_up import throwaway_request
from records.generation import GenerationRequest
from rollouts.deciders import CompletionSource
from rollouts.fork import Tokens
from telemetry.errors import EngineError
from telemetry.memory import freeze_old_objects

REQUESTS, PROMPT, TOKENS = 64, 440, 24


async def http_figures(engine: Engine, tokens: Tokens, model: Path, inputs: RunInputs, *, rounds: int) -> dict[str, float]:
    """Requests a second over HTTP, over those in this process; CPU milliseconds of client and worker for a decision.

    Requests are REQUESTS at a time, with PROMPT tokens in and TOKENS out. CPU time is that of the rollouts of whole steps.
    """
    from workers.pool import RemoteEngine

    worker, address = await asyncio.to_thread(_start_worker, model)
    remote = RemoteEngine(InferenceSettings(urls=(address,), model=str(model)), None, model_fingerprint(model))
    dice, ratios = random.Random(f"http {inputs.seed}"), []
    try:
        await remote.start()
        for number in range(rounds + 1):
            inside = await _seconds(engine, _requests(dice, tokens, f"in/{number}"))
            outside = await _seconds(remote, _requests(dice, tokens, f"out/{number}"))
            ratios.append(inside / outside)
        client_ms, worker_ms = await rollout_ms(remote, lambda: tree_cpu_s(worker.pid), tokens, inputs, rounds=rounds)
    finally:
        await remote.close()
        worker.terminate()
        await asyncio.to_thread(worker.wait, 60)
    return {
        "http_over_inprocess": median(ratios[1:]),
        "client_ms_per_decision_http": client_ms,
        "worker_ms_per_decision_http": worker_ms,
    }


async def rollout_ms(
    remote: CompletionSource, worker_cpu_s: Callable[[], float], tokens: Tokens, inputs: RunInputs, *, rounds: int
) -> tuple[float, float]:
    """CPU milliseconds a decision of this process (games, prompts, tables, HTTP, rows) and of the worker, in whole steps.

    Args:
        worker_cpu_s: CPU seconds that the worker has spent so far.
    """
    spent = []
    with freeze_old_objects():  # as a run's flow
        for step in range(1, rounds + 2):
            client, worker = time.process_time(), worker_cpu_s()
            decisions = len((await play_step(inputs, step, remote, tokens)).decisions)
            spent.append((1e3 * (time.process_time() - client) / decisions, 1e3 * (worker_cpu_s() - worker) / decisions))
    client_ms, worker_ms = zip(*spent[1:], strict=True)  # the first one warms up
    return median(client_ms), median(worker_ms)


def _requests(dice: random.Random, tokens: Tokens, label: str) -> list[GenerationRequest]:
    shape = throwaway_request("shape", tokens.codec.eos_id, tokens=TOKENS)
    return [
        GenerationRequest(
            request_id=f"{label}/{number}",
            prompt_ids=made_up_prompt(dice, tokens, PROMPT),
            table=shape.table,
            seed=dice.getrandbits(40),
        )
        for number in range(REQUESTS)
    ]


async def _seconds(engine: Any, requests: Sequence[GenerationRequest]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(engine.generate(request) for request in requests))
    return time.perf_counter() - began


def _start_worker(model: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a worker on a free port of the loopback interface; returns it with its address once it is ready."""
    words = ["serve", "--model", str(model), "--port", "0", "--adapters", "merge_reload", "--threads", "1"]
    program = "from cli.main import main; main()"
    worker = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent), "OMP_NUM_THREADS": "1"},
    )
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if "http://" not in line:
        worker.kill()
        raise EngineError("the inference worker of the benchmark did not start: run `entente serve` to see why")
    return worker, "http://" + line.rsplit("http://", 1)[1].strip()
