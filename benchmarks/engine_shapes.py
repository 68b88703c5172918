"""Engines with a model of a large model's size: decisions a second by requests in flight, swaps, and correct log-probabilities.

    python -m benchmarks.engine_shapes record requests.arrow                     on a machine that can play games
    python -m benchmarks.engine_shapes measure requests.arrow --scratch DIR      on the machine of the engine; plays no games

The model has the shape of a real one and random weights: it is as fast and as large, but writes nothing meaningful. Every arm
runs in its own process, so that its memory is free afterwards; if one fails, the others still run, and its file holds the figures
it had until then. Times are wall times, because on a GPU the driving thread may be idle.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.recorded_requests import NOTATIONS, Recording, read
from benchmarks.trainer_cases import QWEN_7B, Shape, model_of
from inference.settings import InferenceSettings
from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion

SHAPES = {
    "qwen2.5-7b": QWEN_7B,
    "tiny": Shape(family="qwen2", hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocabulary=131_072),
}
ARMS = {
    "base": {"adapters": "merge_reload"},  # vLLM in this process, without LoRA
    "slots": {"adapters": "slots"},  # vLLM in this process, with LoRA slots
    "async": {"adapters": "slots"},  # vLLM's core in its own process, as an inference worker runs it
    "fp8": {"adapters": "merge_reload", "quantization": "fp8"},  # weights of eight bits
    "torch": {},  # the torch engine
}
"""Arm -> its inference settings."""
BATCHES = (1, 8, 32, 128, 256, 512)
RANK = 16
VERSIONS = 4
"""Adapters published by an arm with an adapter; the first one warms up."""
SCORED = 64
"""Requests whose log-probabilities are compared with those of transformers."""


class Figures:
    """The figures of an arm, written to its file after each one."""

    def __init__(self, file: Path) -> None:
        self._file, self.values = file, dict[str, float]()

    def add(self, name: str, value: float) -> None:
        """Store and print a figure."""
        self.values[name] = value
        self._file.write_text(json.dumps(self.values))
        _print(f"{self._file.stem}.{name} {value:.5g}")


def measure(
    requests: Path, scratch: Path, *, shape: str, dtype: str, arms: Sequence[str], most: int, eager: bool
) -> dict[str, dict[str, float]]:
    """Measure arm by arm, each in its own process; returns the figures by arm.

    Args:
        requests: a file that `recorded_requests.record` wrote.
        scratch: folder for the model (15 GB in the shape of a 7B), caches and figures.
        shape: one of SHAPES.
        most: the largest batch.
        eager: without CUDA graphs and compiling.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    make_model(scratch / "model", SHAPES[shape], read(requests).eos_id, dtype)
    for name in arms:
        began = time.perf_counter()
        options = ["--scratch", str(scratch), "--dtype", dtype, "--most", str(most), *(["--eager"] * eager)]
        done = subprocess.run([sys.executable, "-m", "benchmarks.engine_shapes", "arm", name, str(requests), *options])
        _print(f"arm {name}: exit {done.returncode} after {time.perf_counter() - began:.0f} s")
    return {file.stem: json.loads(file.read_text()) for file in sorted(scratch.glob("*.json"))}


def make_model(folder: Path, shape: Shape, eos_id: int, dtype: str) -> None:
    """Write a model of random weights, unless the folder has one already."""
    if (folder / "config.json").is_file():
        return
    import torch

    model = model_of(shape, device="cuda" if torch.cuda.is_available() else "cpu", dtype=getattr(torch, dtype))
    model.config.eos_token_id, model.config.bos_token_id = eos_id, None
    model.save_pretrained(str(folder), max_shard_size="4GB")


# -- arms ------------------------------------------------------------------------------------------------------------------


def run_arm(name: str, requests: Path, scratch: Path, *, dtype: str, most: int, eager: bool) -> None:
    """Measure one arm in this process, then compare its log-probabilities with those of transformers."""
    recording, figures = read(requests), Figures(scratch / f"{name}.json")
    settings = InferenceSettings(
        model=str(scratch / "model"),
        dtype=dtype,  # type: ignore[arg-type]
        max_sequences=most,
        max_batched_tokens=8192,
        adapter_rank=RANK,
        enforce_eager="on" if eager else "auto",
        compile_cache=str(scratch / "compiled"),
    ).model_copy(update=ARMS[name])
    drawn = asyncio.run(_measure_engine(name, settings, scratch, recording, figures))
    for reference in dict.fromkeys((dtype,) if name == "fp8" else (dtype, "float32")):
        _score(drawn, reference, scratch, figures, name)


def _engine_of(name: str, settings: InferenceSettings, model: Path) -> Any:
    if name == "torch":
        from inference.torch_engine import TorchEngine

        return TorchEngine(model, settings, name=name)
    if name == "async":
        from inference.async_engine import AsyncEngine

        return AsyncEngine(model, settings, name=name)
    from inference.embedded import EmbeddedEngine

    return EmbeddedEngine(model, settings, name=name)


Drawn = list[tuple[GenerationRequest, Generation]]


async def _measure_engine(name: str, settings: InferenceSettings, scratch: Path, recording: Recording, figures: Figures) -> Drawn:
    """Rates of the base model, then of an adapter where the arm serves one; returns the generations to score."""
    engine, began = _engine_of(name, settings, scratch / "model"), time.perf_counter()
    await engine.start()
    figures.add("start_s", time.perf_counter() - began)
    for notation in NOTATIONS if name == "base" else ("full",):
        await _measure_rates(engine, recording.requests(notation, label=notation), settings, figures, f"_{notation}")
    if name in ("slots", "async", "torch"):
        swaps = []
        for version, request in enumerate(recording.requests("full", label="swap")[:VERSIONS], 1):
            policy = _make_adapter(scratch, version)
            began = time.perf_counter()
            await engine.publish(policy)
            await engine.generate(request)
            swaps.append(1e3 * (time.perf_counter() - began))
        figures.add("swap_to_whole_decision_ms", median(swaps[1:]))
        await _measure_rates(engine, recording.requests("full", label="adapter"), settings, figures, "_full_one_version")
    requests = recording.requests("full", label="score")[:SCORED]
    generations = await asyncio.gather(*(engine.generate(request) for request in requests))
    await engine.close()
    return list(zip(requests, generations, strict=True))


async def _measure_rates(
    engine: Any, requests: Sequence[GenerationRequest], settings: InferenceSettings, figures: Figures, suffix: str
) -> None:
    """Decisions a second by requests in flight. No batch size finds the prefixes of another one in the cache."""
    for batch in (batch for batch in BATCHES if batch <= settings.max_sequences):
        some = requests if batch >= 128 else requests[: 8 + 4 * batch]
        limit, began = asyncio.Semaphore(batch), time.perf_counter()

        async def draw(request: GenerationRequest, limit: asyncio.Semaphore, batch: int) -> None:
            # The first token differs between batch sizes, so they share no prefix.
            prompt = [1000 + batch, *request.prompt_ids]
            async with limit:
                await engine.generate(replace(request, request_id=f"{request.request_id}/{batch}", prompt_ids=prompt))

        await asyncio.gather(*(draw(request, limit, batch) for request in some))
        figures.add(f"decisions_per_s_{batch}_in_flight{suffix}", len(some) / (time.perf_counter() - began))


def _make_adapter(scratch: Path, version: int) -> PolicyVersion:
    """A policy version with random weights, large enough to change what is drawn."""
    import torch

    from inference.adapter_check import version_in
    from inference.calibrate import write_random_adapter

    folder = scratch / f"adapter-{version}"
    if not folder.is_dir():
        folder.mkdir()
        torch.manual_seed(version)
        write_random_adapter(folder, scratch / "model", RANK, 0.01)
    return version_in(folder, version)


def _score(drawn: Drawn, dtype: str, scratch: Path, figures: Figures, name: str) -> None:
    """Compare drawn log-probabilities with those of transformers over each whole text: nats, at branching tokens."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(scratch / "model", dtype=getattr(torch, dtype))
    model = model.to(device)
    if version := drawn[0][1].policy.version:
        model = PeftModel.from_pretrained(model, str(_make_adapter(scratch, version).folder))
    gaps = []
    with torch.no_grad():
        for request, generation in drawn:
            tokens = generation.token_ids.tolist()
            logits = model(torch.tensor([[*request.prompt_ids, *tokens]], device=device)).logits[0].float()
            legal, offsets = request.table.legal_sets(tokens)
            for place, token in enumerate(tokens):
                allowed = legal[offsets[place] : offsets[place + 1]].tolist()
                if len(allowed) > 1:
                    row = logits[len(request.prompt_ids) + place - 1]
                    expected = float(row[token] - torch.logsumexp(row[allowed], 0))
                    gaps.append(abs(expected - float(generation.logprobs[place])))
    figures.add(f"{name}_against_{dtype}_mean_nats", float(np.mean(gaps)))
    figures.add(f"{name}_against_{dtype}_p99_nats", float(np.quantile(gaps, 0.99)))


# -- the commands ----------------------------------------------------------------------------------------------------------


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run `record`, `measure`, or one arm of `measure`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="play start groups, seven powers each, and write the requests of the rollouts")
    recording.add_argument("--groups", type=int, default=6)
    recording.add_argument("--forks", type=int, default=8)
    recording.add_argument("--seed", type=int, default=0)
    measuring = commands.add_parser("measure", help="all arms; the last line is one JSON object")
    measuring.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    measuring.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    one = commands.add_parser("arm", help="one arm, in this process")
    one.add_argument("name", choices=ARMS)
    for each in (recording, measuring, one):
        each.add_argument("requests", type=Path, help="the file of recorded requests")
    for each in (measuring, one):
        each.add_argument("--scratch", type=Path, required=True, help="folder for the model, 15 GB for a 7B, and figures")
        each.add_argument("--dtype", default="bfloat16")
        each.add_argument("--most", type=int, default=BATCHES[-1], help="largest batch")
        each.add_argument("--eager", action="store_true", help="without CUDA graphs and compiling")
    given = vars(parser.parse_args())
    command = given.pop("command")
    if command == "record":
        from benchmarks.recorded_requests import record

        count = record(given["requests"], groups=given["groups"], forks=given["forks"], years=1, seed=given["seed"])
        _print(f"{count} requests in {given['requests']}")
    elif command == "arm":
        run_arm(**given)
    else:
        _print(json.dumps({"benchmark": "engine_shapes", "shape": given["shape"], "metrics": measure(**given)}))


if __name__ == "__main__":
    main()
