"""Compares an engine in this process with an inference worker behind HTTP; the two take turns.

The worker is `entente serve` in a process of its own, on a core of its own, so wall times are compared.
"""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.decode_cases import made_up_prompt
from decoding.model_files import model_fingerprint
from inference.engine import Engine
from inference.settings import InferenceSettings
from inference.warm_up import throwaway_request
from records.generation import GenerationRequest
from rollouts.fork import Tokens
from telemetry.errors import EngineError

REQUESTS, PROMPT, TOKENS = 64, 440, 24


async def http_over_inprocess(engine: Engine, tokens: Tokens, model: Path, *, rounds: int, seed: int) -> dict[str, float]:
    """Requests a second over HTTP, over those in this process: REQUESTS at a time, PROMPT tokens in and TOKENS out."""
    from workers.pool import RemoteEngine

    worker, address = await asyncio.to_thread(_start_worker, model)
    remote = RemoteEngine(InferenceSettings(urls=(address,), model=str(model)), None, model_fingerprint(model))
    dice, ratios = random.Random(f"http {seed}"), []
    try:
        await remote.start()
        for number in range(rounds + 1):
            inside = await _seconds(engine, _requests(dice, tokens, f"in/{number}"))
            outside = await _seconds(remote, _requests(dice, tokens, f"out/{number}"))
            ratios.append(inside / outside)
    finally:
        await remote.close()
        worker.terminate()
        await asyncio.to_thread(worker.wait, 60)
    return {"http_over_inprocess": median(ratios[1:])}


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
