"""Sampling parameters of a decision for vLLM, as JSON holds them: only the mask and the temperature change the distribution.

Our logits processor draws, by seed and temperature of the request, and leaves vLLM one token to take. A seed given to vLLM
would cost a launch per request over the whole vocabulary.

The forced tokens at the start of a completion are passed to vLLM as the end of the prompt.
"""

from typing import Any

from decoding.legal_table import END, LegalTable
from inference.legal_admission import DRAW_KEY, START_KEY, TABLE_KEY, table_cache
from records.generation import GenerationRequest


def forced_prefix(table: LegalTable) -> tuple[list[int], int]:
    """The forced tokens at the start of every completion, and the node after them.

    Empty with node 0 if the table begins with a thought, has no branching node or is not checked yet.
    """
    head, start = table.forced(0) if table.is_sound and table.thought is None else ([], 0)
    return ([], 0) if start == END else (head, start)


def prompt_ids(request: GenerationRequest) -> list[int]:
    """The prompt and the forced tokens after it."""
    return [*request.prompt_ids, *forced_prefix(request.table)[0]]


def sampling_fields(request: GenerationRequest, eos_id: int) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams` for `request`, to be used with its `prompt_ids`; vLLM returns the log-probability of each
    drawn token.
    """
    head, start = forced_prefix(request.table)
    return {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": request.table.longest - len(head),
        "stop_token_ids": [eos_id],
        # A thought may contain whatever else vLLM takes for an end of sequence.
        "ignore_eos": request.table.thought is not None,
        "logprobs": 0,
        "detokenize": False,
        "extra_args": {
            TABLE_KEY: table_cache.encode(request.table),
            START_KEY: start,
            DRAW_KEY: [request.seed, request.temperature],
        },
    }


def sampling_params(request: GenerationRequest, eos_id: int) -> Any:
    """`sampling_fields` for a vLLM in this process."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # Used for one request only, so vLLM need not copy it.
    return SamplingParams(**sampling_fields(request, eos_id), output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True)


def unmasked_params(seed: int, tokens: int) -> Any:
    """Parameters for exactly `tokens` tokens without a mask; benchmarks compare the mask's cost with these."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=seed,
        max_tokens=tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
