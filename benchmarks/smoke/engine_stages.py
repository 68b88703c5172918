"""Smoke test stages that start the engine: rates, and the legal mask against a reference. Requests are forks after one phase."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from benchmarks.decode_cases import FreshPrefixes, played_positions, requests_for, rollout_cases, sample
from benchmarks.smoke.job import LONGEST, Job, StageFailed, StagePass
from entente.decoding.architectures import read_architecture
from entente.decoding.codec import Codec
from entente.decoding.model_files import max_position, resolve_model
from entente.inference.choose_engine import choose_engine, engine_here
from entente.inference.engine_cards import vllm_build
from entente.inference.settings import InferenceSettings
from entente.players.policy import Tokens
from entente.records.policy_version import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PolicyVersion, version_in
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.cards import visible_cards
from entente.telemetry.progress import reporter
from entente.training.mismatch import Mismatch, check_mismatch
from entente.training.settings import TinyModelSettings
from entente.training.tiny_model import make_tiny_model
from storage.runs import MODEL_FOLDER

RANK = 16
BATCHES = {"cpu": (1, 8, 32, 128), "cuda": (1, 8, 32, 128, 256, 512)}
SCORED = 64
TINY = TinyModelSettings(source_games=8, imitation_steps=30, imitation_positions=3)
"""The tiny model with seconds of imitation training: it need not play well."""
_MOVED = 0.2
"""Norm of an adapter's contribution to a layer's output for an input of norm 1: enough to change the samples."""
_FREED_WITHIN_S = 60.0

Sampled = Sequence[tuple[GenerationRequest, Generation]]


def model_folder(job: Job) -> Path:
    """The folder of the job's model; makes the tiny one if it is missing. Raises InputError if the model cannot be used."""
    if job.model != "tiny":
        return resolve_model(job.model)
    return make_tiny_model(job.runs / MODEL_FOLDER, TINY, reporter().stage)


def random_policy(job: Job, model: Path, version: int) -> PolicyVersion:
    folder, architecture, tensors = job.folder / "adapters" / f"{model.name}-{version}", read_architecture(model), {}
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(version)
    spread = math.sqrt(_MOVED / math.sqrt(architecture.hidden * RANK))
    for path, (out_features, in_features) in architecture.linear_layers().items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = spread * torch.randn(RANK, in_features)
        tensors[f"base_model.model.{path}.lora_B.weight"] = spread * torch.randn(out_features, RANK)
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    targets = sorted(architecture.targets())
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / ADAPTER_CONFIG).write_text(
        json.dumps(described | {"base_model_name_or_path": str(model), "task_type": "CAUSAL_LM"})
    )
    return version_in(folder, version)


def engine_settings(job: Job) -> InferenceSettings:
    model, on_card = model_folder(job), job.device == "cuda"
    return InferenceSettings(
        model=str(model),
        # A CUDA build of vLLM does not run on a CPU.
        engine="torch" if not on_card and vllm_build() == "cuda" else "auto",
        dtype=job.dtype,
        adapter_rank=RANK,
        max_sequences=BATCHES[job.device][-1],
        max_batched_tokens=8192 if on_card else 4096,
        max_model_length=min(LONGEST[job.device], max_position(model)),
    )


@asynccontextmanager
async def running(settings: InferenceSettings) -> AsyncIterator[Any]:
    """A started engine; afterwards closes it and waits until its memory is free."""
    engine: Any = choose_engine(settings, Path(settings.model))
    before = _free_bytes()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        until = time.monotonic() + _FREED_WITHIN_S
        while _free_bytes() < before - 2**30 and time.monotonic() < until:
            await asyncio.sleep(0.2)


def _free_bytes() -> int:
    """Free memory of the visible cards, by NVML, because CUDA must not be initialised before the engine starts."""
    return sum(card.free for card in visible_cards())


def make_requests(model: Path, count: int, label: str) -> list[GenerationRequest]:
    tokens, games = Tokens(Codec(model)), 4 if count <= 128 else 8
    cases = rollout_cases(played_positions(games, seed=7), forks=max(2, count // (6 * games)), phases=2)
    return requests_for(cases[:: max(1, len(cases) // count)][:count], tokens, label)


def renamed(requests: Sequence[GenerationRequest], label: str) -> list[GenerationRequest]:
    return [replace(request, request_id=f"{label}/{number}") for number, request in enumerate(requests)]


async def rate(engine: Any, requests: Sequence[GenerationRequest], label: str, in_flight: int) -> float:
    """Decisions per second. The first prompt token depends on `in_flight`, so that no prompt is in the prefix cache yet."""
    some = renamed(requests[: 8 + 4 * in_flight], label)
    began = time.perf_counter()
    await sample(FreshPrefixes(engine, in_flight.bit_length()), some, in_flight)
    return len(some) / (time.perf_counter() - began)


def with_engine(job: Job, work: Callable[[Any], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with running(engine_settings(job)) as engine:
            return await work(engine)

    return asyncio.run(run())


# -- the reference: a plain transformers forward, and a loop over positions ------------------------------------------------


def reference_logprobs(model: Any, request: GenerationRequest, generation: Generation) -> np.ndarray:
    """Masked log-probabilities of a completion, float64 [completion tokens], from one forward in the model's dtype."""
    tokens = generation.token_ids.tolist()
    legal_ids, offsets = request.table.legal_sets(tokens)
    with torch.no_grad():
        ids = torch.tensor([[*request.prompt_ids, *tokens]], device=model.device)
        logits = model(input_ids=ids).logits[0].double() / request.temperature
    logprobs = []
    for position, token in enumerate(tokens):
        row = logits[len(request.prompt_ids) + position - 1]
        legal = legal_ids[offsets[position] : offsets[position + 1]].tolist()
        logprobs.append(float(row[token] - torch.logsumexp(row[legal], 0)))
    return np.array(logprobs)


def load_reference(job: Job, policy: PolicyVersion | None = None) -> Any:
    """The model in transformers, in float32 unless the card is too small. Close the engine first."""
    folder, dtype = model_folder(job), torch.float32
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if job.device == "cuda" and 2.4 * weights > torch.cuda.mem_get_info()[0]:
        dtype = torch.bfloat16
    torch.backends.cuda.enable_cudnn_sdp(False)  # it compiles a plan for each new length
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = model.to(job.device)
    return (model if policy is None else PeftModel.from_pretrained(model, str(policy.folder))).eval()


def check_sampled(job: Job, model: Any, sampled: Sampled) -> Mismatch:
    """Compare completions and log-probabilities with the reference, with a run's tolerances. Raises DataError if a table does not
    allow its completion, StageFailed if a forced token's probability is not 1, TrainingError for too large differences."""
    gaps, uncertain = [], 0
    for request, generation in sampled:
        branching = np.diff(request.table.legal_sets(generation.token_ids.tolist())[1]) > 1
        gaps.append(np.abs(reference_logprobs(model, request, generation) - generation.logprobs)[branching])
        uncertain += int((generation.logprobs[~branching] != 0).sum())
    if uncertain:
        raise StageFailed(f"{uncertain} forced tokens have a probability other than 1")
    mismatch = Mismatch.of(np.concatenate(gaps), job.dtype, job.dtype)
    check_mismatch(mismatch, 0)
    return mismatch


# -- the stages ------------------------------------------------------------------------------------------------------------


def engine(job: Job) -> StagePass:
    model, batches = model_folder(job), BATCHES[job.device]
    requests = make_requests(model, 8 + 4 * batches[-1], "rate")
    began = time.perf_counter()

    async def measure(engine: Any) -> StagePass:
        figures = {"start_s": time.perf_counter() - began}
        for batch in batches:
            figures[f"decisions_per_s.{batch}"] = await rate(engine, requests, f"base-{batch}", batch)
        swaps = []
        for version, request in enumerate(requests[:4], 1):  # the first warms up
            swap = time.perf_counter()
            await engine.publish(random_policy(job, model, version))
            await sample(engine, renamed([request], f"swap-{version}"))
            swaps.append(1e3 * (time.perf_counter() - swap))
        figures["swap_ms"] = median(swaps[1:])
        most = max(batches, key=lambda batch: figures[f"decisions_per_s.{batch}"])
        return StagePass(
            sentence=f"{engine_here(engine_settings(job))[0]} is ready after {figures['start_s']:.1f} s and samples "
            f"{figures[f'decisions_per_s.{most}']:.0f} decisions/s with {most} in flight; an adapter swap takes "
            f"{figures['swap_ms']:.0f} ms",
            figures=figures,
        )

    return with_engine(job, measure)


def legal_mask(job: Job) -> StagePass:
    """Completions of the base and of a published version are legal, with the log-probabilities of transformers."""
    model = model_folder(job)
    policy, requests = random_policy(job, model, 1), make_requests(model, SCORED, "mask")

    async def measure(engine: Any) -> tuple[list[Generation], list[Generation]]:
        base = await sample(engine, requests)
        await engine.publish(policy)
        return base, await sample(engine, renamed(requests, "adapter"))

    base, adapted = with_engine(job, measure)
    if {generation.policy.version for generation in adapted} != {1}:
        raise StageFailed("the engine sampled from another version than the published one")
    gaps = [
        check_sampled(job, load_reference(job, version), list(zip(requests, sampled, strict=True)))
        for version, sampled in ((None, base), (policy, adapted))
    ]
    return StagePass(
        sentence=f"{2 * len(requests)} completions are legal; branching tokens differ from transformers by "
        f"{max(gap.mean for gap in gaps):.2g} nats on average, {max(gap.largest for gap in gaps):.2g} at most, with and without "
        "an adapter",
        figures={"gap_mean_nats": max(gap.mean for gap in gaps), "gap_largest_nats": max(gap.largest for gap in gaps)},
    )
