"""`decode`: decisions per second of an engine, and the effect of legal tables, prefix cache, batching and adapter swaps.

A ratio is the median over rounds of two arms that alternate in one process, on one thread, in CPU seconds. Default engine, tiny
model, all decisions of a step's start groups (`benchmarks/decode_cases.py`), empty prefix cache per arm.
"""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.decode_cases import Case, FreshPrefixes, RunInputs, record_step, requests_for, sample
from benchmarks.outcome import Outcome, Target
from entente.decoding.codec import Codec
from entente.decoding.table_builder import TableBuilder
from entente.game.legal import LegalOrders
from entente.inference.choose_engine import choose_engine
from entente.inference.engine import Engine
from entente.inference.legal_admission import encode_table
from entente.inference.settings import InferenceSettings
from entente.inference.vllm_wire import throwaway_request
from entente.players.policy import Tokens
from entente.records.policy_version import version_in
from entente.records.rows import GenerationRequest
from entente.telemetry.errors import EngineError
from entente.telemetry.progress import reporter

TARGETS = {
    "table_ms_rollouts": Target(at_most=0.2),
    "batched_over_sequential_rollouts": Target(at_least=4.0),
    "prefix_hit_share": Target(at_least=0.55),
    "swap_ms": Target(at_most=150.0),
}
STEPS = 3
"""Steps with rollouts. The arms sample the decisions of the first step again."""
IN_FLIGHT = 64
"""Forks of a laptop step: its maximum decisions in flight."""
RATES_AT = (1, 8, 32, 64, 128)


def bench_decode(*, rounds: int = 5, model: Path, inputs: RunInputs) -> Outcome:
    return asyncio.run(_measure(model, inputs, rounds=rounds))


async def _measure(model: Path, inputs: RunInputs, *, rounds: int) -> Outcome:
    engine, tokens = choose_engine(InferenceSettings(), model), Tokens(Codec(model))
    await engine.start()
    try:
        reporter().say("measuring whole rollouts")
        metrics, cases = await rollout_figures(engine, tokens, inputs, rounds=rounds)
        metrics |= await batching_figures(engine, requests_for(cases, tokens, "again"), rounds=rounds)
        metrics["swap_ms"] = await swap_ms(engine, tokens, model, rounds=rounds)
    finally:
        await engine.close()
    return Outcome(benchmark="decode", metrics=metrics, targets=TARGETS)


# -- rollouts --------------------------------------------------------------------------------------------------------------


async def rollout_figures(engine: Any, tokens: Tokens, inputs: RunInputs, *, rounds: int) -> tuple[dict[str, float], list[Case]]:
    """Tokens, prefix hits and table times over the rollouts of STEPS steps, and the decisions of the first step."""
    steps = []
    for step in range(1, STEPS + 1):
        await engine.forget_prefixes()  # as each new version does in a run
        steps.append(await record_step(inputs, step, FreshPrefixes(engine, step), tokens))
    sampled = [pair for step in steps for pair in step.sampled]
    decisions = sum(step.decisions for step in steps)
    prompt_tokens = sum(len(request.prompt_ids) for request, _ in sampled)
    cached_tokens = sum(generation.cached_tokens for _, generation in sampled)
    completion_tokens = sum(len(generation.token_ids) for _, generation in sampled)
    forced = sum(int((generation.logprobs == 0).sum()) for _, generation in sampled)
    first, *others = ([case.legal for case in step.cases] for step in steps)
    return {
        "prefix_hit_share": cached_tokens / prompt_tokens,
        "prompt_tokens_per_decision_rollouts": prompt_tokens / decisions,
        "uncached_tokens_per_decision": (prompt_tokens - cached_tokens) / decisions,  # warm-ups included
        "completion_tokens_per_decision_rollouts": completion_tokens / decisions,
        "forced_token_share_rollouts": forced / completion_tokens,
        "table_ms_rollouts": table_ms(tokens, first, [legal for asked in others for legal in asked], rounds=rounds),
    }, steps[0].cases


def table_ms(tokens: Tokens, warm_up: Sequence[LegalOrders], asked: Sequence[LegalOrders], *, rounds: int) -> float:
    """CPU milliseconds per table: mean over `asked`, median over rounds. `warm_up` fills the cache of encoded orders."""
    spent = []
    for _ in range(rounds):
        builder = TableBuilder(tokens.codec)
        for legal in warm_up:
            encode_table(builder.table(legal))
        began = time.process_time()
        for legal in asked:
            encode_table(builder.table(legal))
        spent.append(time.process_time() - began)
    return 1e3 * median(spent) / len(asked)


# -- batches ---------------------------------------------------------------------------------------------------------------


def gpu_aware_clock() -> float:
    """CPU seconds; with a GPU wall seconds, because the thread that drives the GPU may be idle."""
    import torch

    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


async def batching_figures(engine: Any, requests: Sequence[GenerationRequest], *, rounds: int) -> dict[str, float]:
    """Decisions per CPU second at each of RATES_AT, and the gain from 1 to IN_FLIGHT; each with an empty prefix cache."""
    seconds: dict[int, list[float]] = {in_flight: [] for in_flight in RATES_AT}
    firsts = itertools.count(STEPS + 1)
    for _ in range(rounds):
        for in_flight, spent in seconds.items():
            await engine.forget_prefixes()
            fresh = FreshPrefixes(engine, next(firsts))
            began = gpu_aware_clock()
            await sample(fresh, requests, in_flight)
            spent.append((gpu_aware_clock() - began) / len(requests))
    ratios = [alone / together for alone, together in zip(seconds[1], seconds[IN_FLIGHT], strict=True)]
    return {
        "batched_over_sequential_rollouts": median(ratios),
        **{f"decisions_per_s_{in_flight}_in_flight_rollouts": 1 / median(spent) for in_flight, spent in seconds.items()},
    }


# -- versions --------------------------------------------------------------------------------------------------------------


async def swap_ms(engine: Engine, tokens: Tokens, model: Path, *, rounds: int) -> float:
    """Wall milliseconds from a written adapter to the first token sampled with it, for a prompt of 200 tokens."""
    from entente.training.policy import Policy
    from entente.training.settings import TrainingSettings

    policy, spent = Policy(model, TrainingSettings()), []
    with tempfile.TemporaryDirectory(prefix="entente-decode-") as scratch:
        for version in range(1, rounds + 2):
            adapter = Path(scratch) / f"v{version:06d}"
            policy.save_adapter(adapter)
            swapped = version_in(adapter, version)
            request = throwaway_request(f"swap/{version}", tokens.codec.eos_id, prompt=200, first=version)
            began = time.perf_counter()
            await engine.publish(swapped)
            generation = await engine.generate(request)
            spent.append(1e3 * (time.perf_counter() - began))
            if generation.policy != swapped:
                raise EngineError(f"published {swapped}, but the engine sampled from {generation.policy}")
    return median(spent[1:])
