"""Engines and requests of a smoke test: real prompts and legal tables, drawn by the engine that a run would choose."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.decode_cases import played_positions, requests_for, rollout_cases
from decoding.codec import Codec
from decoding.model_files import max_position
from inference.choose_engine import choose_engine, engine_here
from inference.engine_cards import vllm_build
from inference.settings import InferenceSettings
from records.generation import Generation, GenerationRequest
from rollouts.fork import Tokens
from smoke.job import Job, StageFailed
from smoke.models import RANK
from smoke.oracle import Checked, Drawn
from telemetry.cards import visible_cards
from telemetry.errors import DataError
from training.mismatch import check_mismatch
from training.settings import TrainingSettings

BATCHES = {"cpu": (1, 8, 32, 128), "cuda": (1, 8, 32, 128, 256, 512)}
"""Requests in flight of which rates are measured, by device."""
COMPARED = {"cpu": 32, "cuda": 256}
"""Requests in flight where two ways are compared."""
SCORED = 64
"""Requests whose log-probabilities are held against the reference."""
_LONGEST = {"cpu": 512, "cuda": 2048}
_FREED_WITHIN_S = 60.0
"""Seconds to wait for the memory of an engine core that has ended."""
_GIB = 2**30


def engine_settings(job: Job, model: Path, **changed: Any) -> InferenceSettings:
    """The settings of a run's engine on this device, alone on its card."""
    on_card = job.device == "cuda"
    return InferenceSettings(
        model=str(model),
        # A CUDA build of vLLM does not compute on a CPU.
        engine="torch" if not on_card and vllm_build() == "cuda" else "auto",
        dtype=job.dtype,
        adapters="slots" if on_card else "merge_reload",
        adapter_rank=RANK,
        max_sequences=BATCHES[job.device][-1],
        max_batched_tokens=8192 if on_card else 4096,
        max_model_length=min(_LONGEST[job.device], max_position(model)),
    ).model_copy(update=changed)


def kind_of(settings: InferenceSettings) -> str:
    """The engine that `settings` choose here: vllm, vllm_async or torch."""
    return engine_here(settings)[0]


@asynccontextmanager
async def running(settings: InferenceSettings) -> AsyncIterator[Any]:
    """A started engine, which is closed at the end, and its card free again."""
    engine: Any = choose_engine(settings, Path(settings.model), name="smoke")
    before = _free_bytes()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        until = time.monotonic() + _FREED_WITHIN_S
        while _free_bytes() < before - _GIB and time.monotonic() < until:
            await asyncio.sleep(0.2)


def _free_bytes() -> int:
    """Free memory of the visible cards, by NVML: no CUDA before the engine has started. 0 without a card."""
    return sum(card.free for card in visible_cards())


def make_requests(model: Path, count: int, label: str) -> list[GenerationRequest]:
    """About `count` requests of forks that played a phase already, as many from each position."""
    tokens = Tokens(Codec(model))
    games = 4 if count <= 128 else 8
    cases = rollout_cases(played_positions(games, seed=7), forks=max(2, count // (6 * games)), phases=2)
    return requests_for(cases[:: max(1, len(cases) // count)][:count], tokens, label)


def relabelled(requests: Sequence[GenerationRequest], label: str) -> list[GenerationRequest]:
    """The same requests with new ids."""
    return [replace(request, request_id=f"{label}/{number}") for number, request in enumerate(requests)]


async def draw(engine: Any, requests: Sequence[GenerationRequest], in_flight: int = 0) -> list[Generation]:
    """Draw all requests; `in_flight`: most at a time, 0: all at once."""
    limit = asyncio.Semaphore(in_flight or len(requests))

    async def one(request: GenerationRequest) -> Generation:
        async with limit:
            return await engine.generate(request)

    return await asyncio.gather(*(one(request) for request in requests))


async def rate(engine: Any, requests: Sequence[GenerationRequest], label: str, first: int, in_flight: int) -> float:
    """Decisions a second with so many in flight. `first` becomes the first token, so that passes share no cached prefix."""
    some = [replace(each, prompt_ids=[first, *each.prompt_ids]) for each in relabelled(requests[: 8 + 4 * in_flight], label)]
    began = time.perf_counter()
    await draw(engine, some, in_flight)
    return len(some) / (time.perf_counter() - began)


def require_agreement(job: Job, checked: Checked) -> None:
    """Hold completions against the product's own bounds for trainer and engine.

    Raises:
        StageFailed: a forced token is not certain.
        TrainingError: the log-probabilities differ too much.
    """
    if checked.uncertain:
        raise StageFailed(f"{checked.uncertain} of {checked.forced} forced tokens have a probability other than 1")
    check_mismatch(checked.gap, 0, TrainingSettings(dtype=job.dtype))


def illegal(drawn: Drawn) -> int:
    """Completions that their tables do not allow."""
    count = 0
    for request, generation in drawn:
        try:
            request.table.legal_sets(generation.token_ids.tolist())
        except DataError:
            count += 1
    return count
