"""Draws whole batches by vLLM's own calls, timed. Our engine would not send a request without a table of legal orders.

Used by `decode` and `engine_shapes` to compare drawing with and without the legal mask.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from inference.engine import GenerationRequest
from telemetry.errors import EngineError

Prompt = tuple[Sequence[int], Any]
"""Prompt ids, and vLLM's sampling parameters."""


def gpu_aware_clock() -> float:
    """CPU seconds. On a GPU seconds of the clock, because the thread that drives the GPU may wait meanwhile."""
    import torch

    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def masked(request: GenerationRequest, eos_id: int) -> Prompt:
    """The request as our engine would send it."""
    from inference.sampling import prompt_ids, sampling_params

    return prompt_ids(request), sampling_params(request, eos_id)


def draw_batch(
    engine: Any, batch: Sequence[Prompt], served: Sequence[Any] = (), clock: Callable[[], float] = time.perf_counter
) -> tuple[float, list[list[int]]]:
    """Seconds of one batch, and the tokens of each request.

    Args:
        served: the policy version of each request (`inference.serving.Served`); empty: the base model.
    """
    from inference.vllm_engine import lora_request

    vllm, drawn = engine._engine, {}
    began = clock()
    for number, (prompt, parameters) in enumerate(batch):
        lora = lora_request(served[number]) if served else None
        vllm.add_request(f"batch/{number}", {"prompt_token_ids": list(prompt)}, parameters, lora_request=lora)
    while len(drawn) < len(batch):
        for output in vllm.step():
            if output.finished:
                drawn[output.request_id] = list(output.outputs[0].token_ids)
    return clock() - began, [drawn[f"batch/{number}"] for number in range(len(batch))]


def masked_and_unmasked(
    engine: Any,
    requests: Sequence[GenerationRequest],
    fresh_prompt: Callable[[], Sequence[int]],
    eos_id: int,
    *,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float, int]:
    """Seconds of a batch under the legal mask and without it, and the tokens that each arm draws.

    Both arms draw as many tokens, request by request.

    Args:
        fresh_prompt: makes a prompt for the arm without the mask, which no cache holds.
        before: called before each arm, outside of the time.

    Raises:
        EngineError: the arms drew different numbers of tokens.
    """
    from inference.sampling import unmasked_params

    with_mask = [masked(request, eos_id) for request in requests]
    before()
    masked_s, drawn = draw_batch(engine, with_mask, clock=clock)
    plain = [(fresh_prompt(), unmasked_params(each.seed, len(ids))) for each, ids in zip(requests, drawn, strict=True)]
    before()
    unmasked_s, again = draw_batch(engine, plain, clock=clock)
    if [len(ids) for ids in again] != [len(ids) for ids in drawn]:
        raise EngineError("the arms with and without the mask drew different numbers of tokens")
    return masked_s, unmasked_s, sum(map(len, drawn))
