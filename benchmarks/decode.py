"""`decode`: decisions a second of an engine, and what the legal mask, tables, prefixes, slots and swaps cost or save.

Every ratio compares two arms that take turns in one process, on one thread, in CPU seconds; it is the median over the rounds. The
engine is the one that runs use, with the tiny model. Except for the mask, requests are those of whole rollouts: all decisions of
the start groups of a step, as a run plays them (`benchmarks/played_steps.py`). Every arm draws them from an empty prefix cache.
"""

import asyncio
import gc
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.decode_cases import (
    SHAPES,
    Case,
    Models,
    Shape,
    made_up_prompt,
    made_up_requests,
    models_to_measure,
    requests_for,
)
from benchmarks.outcome import Outcome, Target
from benchmarks.played_steps import RunInputs, record_step, uncached_per_decision
from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from game.legal import LegalOrders
from game.prompt_settings import PromptSettings
from inference.engine import Engine
from inference.settings import InferenceSettings
from inference.vllm_arguments import may_jump
from inference.warm_up import throwaway_request
from records.generation import GenerationRequest
from rollouts.fork import Tokens
from telemetry.errors import EngineError, InputError
from telemetry.progress import reporter

TARGETS = {
    "masked_over_unmasked_b32": Target(at_least=0.93),
    "masked_over_unmasked_b128": Target(at_least=0.93),
    "masked_over_unmasked_10units_b32": Target(at_least=0.85),
    "table_ms_rollouts": Target(at_most=0.2),
    "batched_over_sequential_rollouts": Target(at_least=4.0),
    "prefix_hit_share": Target(at_least=0.55),
    "slot_over_full_rollouts": Target(at_least=1.4),
    "swap_ms": Target(at_most=150.0),
}
STEPS = 3
"""Steps whose rollouts are played. The first one's decisions are drawn again to compare arms."""
IN_FLIGHT = 64
"""Forks of a laptop step: the most decisions in flight of one step."""
RATES_AT = (1, 8, 32, 64, 128)
"""Decisions in flight for which rates are measured."""


def bench_decode(
    *,
    rounds: int = 5,
    model: Path | None = None,
    models_root: Path,
    inputs: RunInputs,
    settings: InferenceSettings | None = None,
) -> Outcome:
    """Measure with an engine in this process.

    Args:
        model: folder of the model; None: the tiny one.
        models_root: folder of tiny models. A missing one is made, which takes a minute or two.
        inputs: the run whose rollouts are measured.
        settings: settings of the engine. With `adapters` "auto" and float32, adapters are merged into the weights.

    Raises:
        InputError: `rounds` is below 1.
    """
    if rounds < 1:
        raise InputError(f"There is nothing to measure in {rounds} rounds: at least 1.")
    models, settings = models_to_measure(model, models_root), settings or InferenceSettings()
    if settings.adapters == "auto":
        settings = settings.model_copy(update={"adapters": "merge_reload" if settings.dtype == "float32" else "slots"})
    with tempfile.TemporaryDirectory(prefix="entente-decode-") as scratch:
        return asyncio.run(_measure(models, settings, Path(scratch), inputs, rounds=rounds))


async def _measure(models: Models, settings: InferenceSettings, scratch: Path, inputs: RunInputs, *, rounds: int) -> Outcome:
    from inference.embedded import EmbeddedEngine

    folder, seed = models.full, inputs.seed
    engine, tokens = EmbeddedEngine(folder, settings, name="decode"), Tokens(Codec(folder))
    await engine.start()
    try:
        reporter().say("measuring the mask")
        if jumps := may_jump(settings):  # the mask is measured token by token
            await engine.jump_forced(False)
        metrics = mask_figures(engine, tokens, rounds=rounds, seed=seed)
        if jumps:
            await engine.jump_forced(True)
        reporter().say("measuring whole rollouts")
        found, cases = await rollout_figures(engine, tokens, inputs, rounds=rounds)
        requests = requests_for(cases, tokens, "again")
        metrics |= found | await batching_figures(engine, requests, rounds=rounds)
        if jumps:
            metrics |= await jump_figures(engine, requests, rounds=rounds)
        metrics |= await notation_figures(engine, models, cases, jumps=jumps, rounds=rounds)
        metrics["torch_over_vllm_rollouts"] = await torch_over_vllm(engine, tokens, folder, settings, requests, rounds=rounds)
        metrics["swap_ms"] = await swap_ms(engine, tokens, folder, scratch, rounds=rounds)
    finally:
        await engine.close()
    return Outcome(benchmark="decode", metrics=metrics, targets=TARGETS)


# -- the mask --------------------------------------------------------------------------------------------------------------

Prompt = tuple[Sequence[int], Any]
"""Prompt ids, and vLLM's sampling parameters."""


def mask_figures(engine: Any, tokens: Tokens, *, rounds: int, seed: int) -> dict[str, float]:
    """The cost of the mask for SHAPES, with the prefill of a prompt."""
    return {
        # Small batches are fast and noisy, so they get more rounds.
        f"masked_over_unmasked_{name}": masked_over_unmasked(
            engine, tokens, shape, rounds=rounds * 128 // shape.batch // (shape.units // 4), seed=seed
        )
        for name, shape in SHAPES.items()
    }


def masked_over_unmasked(engine: Any, tokens: Tokens, shape: Shape, *, rounds: int, seed: int) -> float:
    """Tokens a CPU second with the mask over those without it. Both arms draw as many tokens for each request.

    Tables are built before (`table_ms_rollouts` measures that); reading, sending and following them is included.

    Raises:
        EngineError: the arms drew different numbers of tokens.
    """
    from inference.sampling import prompt_ids, sampling_params, unmasked_params

    dice, ratios = random.Random(f"mask {seed}"), []

    def draw(batch: Sequence[Prompt]) -> tuple[float, list[list[int]]]:
        engine._engine.reset_prefix_cache()
        gc.collect()
        return draw_batch(engine, batch, gpu_aware_clock)

    for _ in range(rounds + 1):
        requests = made_up_requests(dice, tokens, shape)
        masked_s, drawn = draw([(prompt_ids(each), sampling_params(each, tokens.codec.eos_id)) for each in requests])
        lengths = [len(ids) for ids in drawn]
        unmasked_s, again = draw(
            [
                (made_up_prompt(dice, tokens), unmasked_params(each.seed, length))
                for each, length in zip(requests, lengths, strict=True)
            ]
        )
        if [len(ids) for ids in again] != lengths:
            raise EngineError("the arms with and without the mask drew different numbers of tokens")
        ratios.append(unmasked_s / masked_s)
    return median(ratios[1:])


def draw_batch(engine: Any, batch: Sequence[Prompt], clock: Callable[[], float]) -> tuple[float, list[list[int]]]:
    """Seconds of one batch, and the tokens of each request, by vLLM's own calls: our engine requires a legal table."""
    vllm, drawn = engine._engine, {}
    began = clock()
    for number, (prompt, parameters) in enumerate(batch):
        vllm.add_request(f"batch/{number}", {"prompt_token_ids": list(prompt)}, parameters)
    while len(drawn) < len(batch):
        for output in vllm.step():
            if output.finished:
                drawn[output.request_id] = list(output.outputs[0].token_ids)
    return clock() - began, [drawn[f"batch/{number}"] for number in range(len(batch))]


def gpu_aware_clock() -> float:
    """CPU seconds; with a GPU wall seconds, because the thread that drives the GPU may be idle."""
    import torch

    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


# -- rollouts --------------------------------------------------------------------------------------------------------------


async def rollout_figures(engine: Any, tokens: Tokens, inputs: RunInputs, *, rounds: int) -> tuple[dict[str, float], list[Case]]:
    """Tokens, prefix hits and table times of the rollouts of STEPS steps, and the decisions of the first."""
    steps = []
    for step in range(1, STEPS + 1):
        engine._engine.reset_prefix_cache()  # as each new version does in a run
        steps.append(await record_step(inputs, step, engine, tokens))
    drawn = [pair for step in steps for pair in step.drawn]
    decisions = sum(step.decisions for step in steps)
    prompt_tokens = sum(len(request.prompt_ids) for request, _ in drawn)
    cached_tokens = sum(generation.cost.cached_tokens for _, generation in drawn)
    completion_tokens = sum(len(generation.token_ids) for _, generation in drawn)
    forced = sum(int((generation.logprobs == 0).sum()) for _, generation in drawn)
    first, *others = ([case.legal for case in step.cases] for step in steps)
    return {
        "prefix_hit_share": cached_tokens / prompt_tokens,
        "prompt_tokens_per_decision_rollouts": prompt_tokens / decisions,
        "uncached_tokens_per_decision": uncached_per_decision(
            prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, decisions=decisions
        ),
        "completion_tokens_per_decision_rollouts": completion_tokens / decisions,
        "forced_token_share_rollouts": forced / completion_tokens,
        "table_ms_rollouts": table_ms(tokens, first, [legal for asked in others for legal in asked], rounds=rounds),
    }, steps[0].cases


def table_ms(tokens: Tokens, warm_up: Sequence[LegalOrders], asked: Sequence[LegalOrders], *, rounds: int) -> float:
    """CPU milliseconds of a table, from the legal orders to the engine: the mean over `asked`, the median over the rounds.

    `warm_up` fills the cache of encoded orders. As in a rollout, some forks share tables.
    """
    from inference.legal_admission import TableCache

    spent = []
    for _ in range(rounds):
        builder, known = TableBuilder(tokens.codec, tokens.prompts.order_notation), TableCache()
        for legal in warm_up:
            known.decode(known.encode(builder.table(legal)))
        began = time.process_time()
        for legal in asked:
            known.decode(known.encode(builder.table(legal)))
        spent.append(time.process_time() - began)
    return 1e3 * median(spent) / len(asked)


# -- batches and notations -------------------------------------------------------------------------------------------------


async def _draw(engine: Engine, requests: Sequence[GenerationRequest], in_flight: int) -> float:
    """CPU seconds to draw `requests`, `in_flight` at a time."""
    limit = asyncio.Semaphore(in_flight)

    async def draw(request: GenerationRequest) -> None:
        async with limit:
            await engine.generate(request)

    began = gpu_aware_clock()
    await asyncio.gather(*(draw(request) for request in requests))
    return gpu_aware_clock() - began


async def _draw_together(engine: Any, requests: Sequence[GenerationRequest], in_flight: int) -> float:
    """As `_draw`, from an empty prefix cache."""
    engine._engine.reset_prefix_cache()
    return await _draw(engine, requests, in_flight)


async def batching_figures(engine: Any, requests: Sequence[GenerationRequest], *, rounds: int) -> dict[str, float]:
    """Decisions a CPU second with 1, 8, 32, 64 and 128 in flight, and the gain from one to 64."""
    seconds: dict[int, list[float]] = {}
    for _ in range(rounds):
        for in_flight in RATES_AT:
            seconds.setdefault(in_flight, []).append(await _draw_together(engine, requests, in_flight) / len(requests))
    ratios = [alone / together for alone, together in zip(seconds[1], seconds[IN_FLIGHT], strict=True)]
    return {
        "batched_over_sequential_rollouts": median(ratios),
        **{f"decisions_per_s_{in_flight}_in_flight_rollouts": 1 / median(spent) for in_flight, spent in seconds.items()},
    }


async def jump_figures(engine: Any, requests: Sequence[GenerationRequest], *, rounds: int) -> dict[str, float]:
    """The same decisions with and without the jump over forced tokens, IN_FLIGHT at a time: ratios of CPU time and passes."""
    ratios, steps = [], {}
    for _ in range(2 * rounds):
        spent = {}
        for jumping in (True, False):
            await engine.jump_forced(jumping)
            before = await engine.stats()
            spent[jumping] = await _draw_together(engine, requests, IN_FLIGHT)
            steps[jumping] = (await engine.stats()).engine_steps - before.engine_steps
        ratios.append(spent[False] / spent[True])
    await engine.jump_forced(True)
    return {"jump_over_one_by_one_rollouts": median(ratios), "jump_passes_share_rollouts": steps[True] / steps[False]}


async def notation_figures(engine: Any, models: Models, cases: Sequence[Case], *, jumps: bool, rounds: int) -> dict[str, float]:
    """Decisions a CPU second in slot notation over full notation, each with a model that learned it; IN_FLIGHT at a time.

    Slots save forced tokens. If the engine jumps over those, the ratio is measured with and without the jump.
    """
    if not jumps:
        return await _notations(engine, models, cases, rounds=rounds)
    jumping = await _notations(engine, models, cases, rounds=rounds)
    await engine.jump_forced(False)
    one_by_one = await _notations(engine, models, cases, rounds=rounds)
    await engine.jump_forced(True)
    return one_by_one | {"slot_over_full_jumping_rollouts": jumping["slot_over_full_rollouts"]}


async def _notations(engine: Any, models: Models, cases: Sequence[Case], *, rounds: int) -> dict[str, float]:
    slot = PromptSettings(order_notation="slot")
    arms = {
        "slot": (models.slot, requests_for(cases, Tokens(Codec(models.slot), slot), "slot")),
        "full": (models.full, requests_for(cases, Tokens(Codec(models.full)), "full")),
    }
    ratios, drawn = [], {}
    for _ in range(2 * rounds):
        spent = {}
        for notation, (folder, requests) in arms.items():
            if models.slot != models.full:
                engine._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            before = await engine.stats()
            spent[notation] = await _draw_together(engine, requests, IN_FLIGHT)
            drawn[notation] = ((await engine.stats()).completion_tokens - before.completion_tokens) / len(requests)
        ratios.append(spent["full"] / spent["slot"])
    return {
        "slot_over_full_rollouts": median(ratios),
        "slot_completion_tokens_rollouts": drawn["slot"],
        "full_completion_tokens_rollouts": drawn["full"],
    }


async def torch_over_vllm(
    engine: Any, tokens: Tokens, model: Path, settings: InferenceSettings, requests: Sequence[GenerationRequest], *, rounds: int
) -> float:
    """Decisions a CPU second of the torch engine over those of `engine`, IN_FLIGHT at a time, with empty caches."""
    from inference.torch_engine import TorchEngine

    ratios = []
    for number in range(rounds + 1):
        torch_engine = TorchEngine(model, settings, name=f"torch-{number}")
        await torch_engine.start()
        try:
            await torch_engine.generate(throwaway_request("warm", tokens.codec.eos_id))
            torch_s = await _draw(torch_engine, requests, IN_FLIGHT)
        finally:
            await torch_engine.close()
        ratios.append(await _draw_together(engine, requests, IN_FLIGHT) / torch_s)
    return median(ratios[1:])


# -- versions --------------------------------------------------------------------------------------------------------------


async def swap_ms(engine: Engine, tokens: Tokens, model: Path, scratch: Path, *, rounds: int) -> float:
    """Wall milliseconds from a written adapter to the first token drawn with it, for a prompt of 200 tokens."""
    from inference.adapter_check import version_in
    from training.policy import Policy
    from training.settings import TrainingSettings

    policy, spent = Policy(model, TrainingSettings()), []
    for version in range(1, rounds + 2):
        adapter = scratch / f"v{version:06d}"
        policy.save_adapter(adapter)
        swapped = version_in(adapter, version)
        request = throwaway_request(f"swap/{version}", tokens.codec.eos_id, prompt=200, tokens=1, first=version)
        began = time.perf_counter()
        await engine.publish(swapped)
        generation = await engine.generate(request)
        spent.append(1e3 * (time.perf_counter() - began))
        if generation.policy != swapped:
            raise EngineError(f"published {swapped}, but the engine drew with {generation.policy}")
    return median(spent[1:])
