"""The sampling parameters of a decision, the same for every vLLM engine: nothing may shape the draw but mask and temperature."""

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from inference.engine import GenerationRequest
from inference.legal_admission import TABLE_KEY, known_tables


def sampling_params(request: GenerationRequest, eos_id: int) -> SamplingParams:
    """Temperature and table of `request`; no top-p, top-k or penalties; the logprob of each drawn token comes back."""
    return SamplingParams(
        temperature=request.temperature,
        top_p=1.0,
        top_k=0,
        seed=request.seed,
        max_tokens=request.table.longest,
        stop_token_ids=[eos_id],
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Made for one request, so vLLM need not copy it in depth.
        skip_clone=True,
        extra_args={TABLE_KEY: known_tables.keep(request.table)},
    )


def unmasked_params(seed: int, tokens: int) -> SamplingParams:
    """The same draw without a mask, of exactly `tokens` tokens: what benchmarks hold the mask's cost against."""
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
