"""Engines in the shape of a large model: the mask, LoRA slots, batches, prefixes, swaps, and whether the logprobs are right.

    python -m benchmarks.engine_shapes record requests.arrow                     where games can be played
    python -m benchmarks.engine_shapes measure requests.arrow --scratch DIR      where the engine is to run; needs no game

The model has random weights in a real model's shape: its speed and memory are the real one's, its words are not. Each arm is a
process of its own, so that none finds the other's memory, and one that fails leaves the others; what it measured by then is in
its file. Seconds are the clock's: on a GPU the thread that drives the card need not be busy.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.recorded_requests import Recording, alike, read, renamed
from benchmarks.trainer_cases import QWEN_7B, Shape, model_of
from benchmarks.vllm_batch import Prompt, draw_batch, masked, masked_and_unmasked
from inference.settings import InferenceSettings
from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion

SHAPES = {
    "qwen2.5-7b": QWEN_7B,
    "tiny": Shape(family="qwen2", hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocabulary=131_072),
}
ARMS = ("base", "slots", "score", "torch", "async", "fp8")
BATCHES = (1, 8, 32, 128, 256, 512)
RANK = 16
_SHARED, _OWN = 416, 24


class Figures:
    """What an arm measured so far; in its file after each figure."""

    def __init__(self, file: Path) -> None:
        self._file, self.values = file, dict[str, float]()

    def add(self, name: str, value: float) -> None:
        """Keep a figure, and say it."""
        self.values[name] = value
        self._file.write_text(json.dumps(self.values))
        _say(f"{self._file.stem}.{name} {value:.5g}")


def measure(
    requests: Path, scratch: Path, *, shape: str, dtype: str, arms: Sequence[str], most: int, eager: bool
) -> dict[str, dict[str, float]]:
    """Measure arm by arm, each in a process; the figures of each.

    Args:
        requests: a file that `recorded_requests.record` wrote.
        scratch: folder for the model (15 GB in the shape of a 7B), caches and figures.
        shape: one of SHAPES.
        most: the largest batch.
        eager: without CUDA graphs and compiling.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    make_model(scratch / "model", SHAPES[shape], read(requests).eos_id, dtype)
    _say(f"model made in {time.perf_counter() - began:.0f} s")
    for name in arms:
        began = time.perf_counter()
        options = ["--scratch", str(scratch), "--dtype", dtype, "--most", str(most), *(["--eager"] * eager)]
        done = subprocess.run([sys.executable, "-m", "benchmarks.engine_shapes", "arm", name, str(requests), *options])
        _say(f"arm {name}: exit {done.returncode} after {time.perf_counter() - began:.0f} s")
    return {file.stem: json.loads(file.read_text()) for file in sorted(scratch.glob("*.json"))}


def run_arm(name: str, requests: Path, scratch: Path, *, dtype: str, most: int, eager: bool) -> None:
    """One arm, in this process."""
    recording, figures = read(requests), Figures(scratch / f"{name}.json")
    settings = InferenceSettings(
        model=str(scratch / "model"),
        dtype=dtype,  # type: ignore[arg-type]
        max_sequences=most,
        max_batched_tokens=8192,
        adapter_rank=RANK,
        enforce_eager="on" if eager else "auto",
        compile_cache=str(scratch / "compiled"),
    )
    if name == "score":
        for other in ("base", "slots"):
            _score(scratch, other, recording, figures, dtypes=(dtype, "float32"))
    else:
        arms = {"base": _base_arm, "slots": _slots_arm, "torch": _torch_arm, "async": _async_arm, "fp8": _quantised_arm}
        asyncio.run(arms[name](scratch, settings, recording, figures))


def make_model(folder: Path, shape: Shape, eos_id: int, dtype: str) -> None:
    """Write a model of random weights; made once."""
    if (folder / "config.json").is_file():
        return
    import torch

    model = model_of(shape, device="cuda" if torch.cuda.is_available() else "cpu", dtype=getattr(torch, dtype))
    model.config.eos_token_id, model.config.bos_token_id = eos_id, None
    model.save_pretrained(str(folder), max_shard_size="4GB")


# -- arms ------------------------------------------------------------------------------------------------------------------


async def _base_arm(scratch: Path, settings: InferenceSettings, recording: Recording, figures: Figures) -> None:
    """vLLM in this process, without LoRA: the mask by batch, batches, hits, notations."""
    from inference.embedded import EmbeddedEngine

    # Merged weights are never published here: this is vLLM without slots.
    engine = EmbeddedEngine(scratch / "model", settings.model_copy(update={"adapters": "merge_reload"}), name="base")
    await _started(engine, figures)
    full, dice = recording.requests("full", label="full"), random.Random("base")
    for batch in _batches(settings):
        rate, unmasked = _mask_rates(engine, full, batch, dice, recording.eos_id)
        figures.add(f"masked_tokens_per_s_b{batch}", rate)
        figures.add(f"masked_over_unmasked_b{batch}", rate / unmasked)
        figures.add(f"seeded_over_unseeded_b{batch}", rate / _unseeded_rate(engine, full, batch, dice, recording.eos_id))
    for notation in ("full", "slot"):
        await _in_flight(engine, recording.requests(notation, label=notation), settings, figures, suffix=f"_{notation}")
    cached = asked = first_cached = first_asked = 0
    for group in range(3):
        engine._engine.reset_prefix_cache()
        for ply, together in enumerate(recording.plies("full", group, label=f"hits/{group}")):
            drawn = await asyncio.gather(*(engine.generate(request) for request in together))
            hits, length = sum(each.cost.cached_tokens for each in drawn), sum(len(request.prompt_ids) for request in together)
            cached, asked = cached + hits, asked + length
            if ply == 0:
                first_cached, first_asked = first_cached + hits, first_asked + length
    figures.add("prefix_hit_share_first_ply", first_cached / first_asked)
    figures.add("prefix_hit_share_all", cached / asked)
    await _keep_draws(scratch / "drawn-base.npz", engine, full)
    await engine.close()


async def _slots_arm(scratch: Path, settings: InferenceSettings, recording: Recording, figures: Figures) -> None:
    """vLLM in this process with LoRA slots: their cost unused and used, several versions at once, swaps."""
    from inference.embedded import EmbeddedEngine

    engine = EmbeddedEngine(scratch / "model", settings.model_copy(update={"adapters": "slots"}), name="slots")
    await _started(engine, figures)
    full, dice = recording.requests("full", label="full"), random.Random("slots")
    spent = []
    for version in range(1, 5):
        policy = _adapter(scratch, version)
        began = time.perf_counter()
        await engine.publish(policy)
        published = time.perf_counter()
        await engine.generate(alike(full, 1, dice, shared=_SHARED, own=_OWN)[0])
        spent.append((1e3 * (published - began), 1e3 * (time.perf_counter() - began)))
    figures.add("publish_ms", median(first for first, _ in spent[1:]))
    figures.add("swap_to_whole_decision_ms", median(whole for _, whole in spent[1:]))
    for batch in _batches(settings):
        arms: dict[str, list[float]] = {"unused": [], "one_version": [], "four_versions": []}
        for _ in range(_rounds(batch)):
            for arm, versions in (("unused", (0,)), ("one_version", (4,)), ("four_versions", (1, 2, 3, 4))):
                together = alike(full, batch, dice, shared=_SHARED, own=_OWN)
                served = [engine._versions.find(versions[number % len(versions)]) for number in range(batch)]
                arms[arm].append(_rate(engine, [masked(each, recording.eos_id) for each in together], served))
        for arm, rates in arms.items():
            figures.add(f"{arm}_tokens_per_s_b{batch}", median(rates[1:]))
    await _in_flight(engine, full, settings, figures, suffix="_full_one_version")
    await _keep_draws(scratch / "drawn-slots.npz", engine, full)
    await engine.close()


async def _async_arm(scratch: Path, settings: InferenceSettings, recording: Recording, figures: Figures) -> None:
    """vLLM in a process of its own with slots, as a worker serves it."""
    from inference.async_engine import AsyncEngine

    engine = AsyncEngine(scratch / "model", settings.model_copy(update={"adapters": "slots"}), name="async")
    await _started(engine, figures)
    await engine.publish(_adapter(scratch, 1))
    await _in_flight(engine, recording.requests("full", label="full"), settings, figures, suffix="_full_one_version")
    await engine.close()


async def _quantised_arm(scratch: Path, settings: InferenceSettings, recording: Recording, figures: Figures) -> None:
    """vLLM with its weights quantised to eight bits while they are loaded; `score` holds its logprobs against the others'."""
    from inference.embedded import EmbeddedEngine

    chosen = settings.model_copy(update={"adapters": "merge_reload", "quantization": "fp8"})
    engine = EmbeddedEngine(scratch / "model", chosen, name="fp8")
    await _started(engine, figures)
    full = recording.requests("full", label="full")
    await _in_flight(engine, full, settings, figures, suffix="_full")
    await _keep_draws(scratch / "drawn-fp8.npz", engine, full)
    await engine.close()
    _score(scratch, "fp8", recording, figures, dtypes=(settings.dtype,))


async def _torch_arm(scratch: Path, settings: InferenceSettings, recording: Recording, figures: Figures) -> None:
    """The torch engine: batches, a version, and its logprobs."""
    from inference.torch_engine import TorchEngine

    engine = TorchEngine(scratch / "model", settings, name="torch")
    await _started(engine, figures)
    full = recording.requests("full", label="full")
    await _in_flight(engine, full, settings, figures, suffix="_full")
    await _keep_draws(scratch / "drawn-torch.npz", engine, full)
    await engine.publish(_adapter(scratch, 4))
    await _in_flight(engine, full, settings, figures, suffix="_full_one_version")
    await engine.close()
    _score(scratch, "torch", recording, figures, dtypes=(settings.dtype,))


# -- how it is measured ----------------------------------------------------------------------------------------------------


def _batches(settings: InferenceSettings) -> list[int]:
    return [batch for batch in BATCHES if batch <= settings.max_sequences]


def _rounds(batch: int) -> int:
    """Times an arm is drawn, the first of them not counted."""
    return 6 if batch <= 8 else 4


async def _started(engine: Any, figures: Figures) -> None:
    began = time.perf_counter()
    await engine.start()
    figures.add("start_s", time.perf_counter() - began)


def _mask_rates(
    engine: Any, requests: Sequence[GenerationRequest], batch: int, dice: random.Random, eos_id: int
) -> tuple[float, float]:
    """Tokens a second under the mask and without it; medians."""
    rates = []
    for _ in range(_rounds(batch)):
        together = alike(requests, batch, dice, shared=_SHARED, own=_OWN)
        masked_s, unmasked_s, tokens = masked_and_unmasked(
            engine, together, lambda: alike(requests, 1, dice, shared=_SHARED, own=_OWN)[0].prompt_ids, eos_id
        )
        rates.append((tokens / masked_s, tokens / unmasked_s))
    return median(with_mask for with_mask, _ in rates[1:]), median(without for _, without in rates[1:])


def _rate(engine: Any, batch: Sequence[Prompt], served: Sequence[Any] = ()) -> float:
    """Tokens a second."""
    seconds, drawn = draw_batch(engine, batch, served)
    return sum(map(len, drawn)) / seconds


def _unseeded_rate(engine: Any, requests: Sequence[GenerationRequest], batch: int, dice: random.Random, eos_id: int) -> float:
    """Tokens a second under the mask where vLLM draws all rows with one generator; median."""
    rates = []
    for _ in range(_rounds(batch)):
        together = [masked(each, eos_id) for each in alike(requests, batch, dice, shared=_SHARED, own=_OWN)]
        for _, parameters in together:
            parameters.seed = None
        rates.append(_rate(engine, together))
    return median(rates[1:])


async def _in_flight(
    engine: Any, requests: Sequence[GenerationRequest], settings: InferenceSettings, figures: Figures, *, suffix: str
) -> None:
    """Decisions a second of real prompts through the whole engine, by requests in flight; each time none was asked before."""
    for batch in _batches(settings):
        some = requests if batch >= 128 else requests[: 8 + 4 * batch]
        room, began = asyncio.Semaphore(batch), time.perf_counter()

        async def draw(request: GenerationRequest, number: int, room: asyncio.Semaphore, batch: int) -> Generation:
            async with room:
                return await engine.generate(
                    # The first token tells the passes apart, so that none finds another's prefix.
                    GenerationRequest(
                        request_id=f"{request.request_id}/{batch}",
                        prompt_ids=[1000 + batch, *request.prompt_ids],
                        table=request.table,
                        seed=request.seed + number,
                    )
                )

        await asyncio.gather(*(draw(request, number, room, batch) for number, request in enumerate(some)))
        figures.add(f"decisions_per_s_{batch}_in_flight{suffix}", len(some) / (time.perf_counter() - began))


def _adapter(scratch: Path, version: int) -> PolicyVersion:
    """A version with random weights that are large enough to change what is drawn."""
    import torch

    from inference.adapter_check import version_in
    from inference.calibrate import write_random_adapter

    folder = scratch / f"adapter-{version}"
    if not folder.is_dir():
        folder.mkdir()
        torch.manual_seed(version)
        write_random_adapter(folder, scratch / "model", RANK, 0.01)
    return version_in(folder, version)


async def _keep_draws(file: Path, engine: Any, requests: Sequence[GenerationRequest]) -> None:
    """Draw the first 64 requests and write down what came, for `_score`."""
    asked = [renamed(request, f"parity/{number}") for number, request in enumerate(requests[:64])]
    drawn = await asyncio.gather(*(engine.generate(request) for request in asked))
    np.savez(
        file,
        version=[each.policy.version for each in drawn],
        tokens=np.concatenate([each.token_ids for each in drawn]),
        logprobs=np.concatenate([each.logprobs for each in drawn]),
        lengths=[len(each.token_ids) for each in drawn],
    )


def _score(scratch: Path, name: str, recording: Recording, figures: Figures, *, dtypes: Sequence[str]) -> None:
    """Distance, nats over branching tokens, of what `name` recorded from transformers over each whole text, by format."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    kept, requests = np.load(scratch / f"drawn-{name}.npz"), recording.requests("full", label="score")
    ends = np.cumsum(kept["lengths"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in dict.fromkeys(dtypes):
        model: Any = AutoModelForCausalLM.from_pretrained(scratch / "model", dtype=getattr(torch, dtype))
        model = model.to(device)
        if version := int(kept["version"][0]):
            model = PeftModel.from_pretrained(model, str(_adapter(scratch, version).folder))
        gaps = []
        with torch.no_grad():
            for request, length, end in zip(requests, kept["lengths"], ends, strict=False):
                tokens, logprobs = kept["tokens"][end - length : end].tolist(), kept["logprobs"][end - length : end]
                logits = model(torch.tensor([[*request.prompt_ids, *tokens]], device=device)).logits[0].float()
                legal, offsets = request.table.legal_sets(tokens)
                for place, token in enumerate(tokens):
                    allowed = legal[offsets[place] : offsets[place + 1]].tolist()
                    if len(allowed) > 1:
                        row = logits[len(request.prompt_ids) + place - 1]
                        gaps.append(abs(float(row[token] - torch.logsumexp(row[allowed], 0)) - float(logprobs[place])))
        del model
        figures.add(f"{name}_against_{dtype}_mean_nats", float(np.mean(gaps)))
        figures.add(f"{name}_against_{dtype}_p99_nats", float(np.quantile(gaps, 0.99)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """The two commands of this file's docstring, and the arm that `measure` starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="play start groups, seven powers each, and write what they ask an engine for")
    recording.add_argument("--groups", type=int, default=6)
    recording.add_argument("--forks", type=int, default=8)
    recording.add_argument("--seed", type=int, default=0)
    measuring = commands.add_parser("measure", help="all arms; the last line is one JSON object")
    measuring.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    measuring.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
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
        _say(f"{count} requests in {given['requests']}")
    elif command == "arm":
        run_arm(**given)
    else:
        _say(json.dumps({"benchmark": "engine_shapes", "shape": given["shape"], "metrics": measure(**given)}))


if __name__ == "__main__":
    main()
