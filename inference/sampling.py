"""What vLLM is asked for a decision, the same for every engine over it: nothing may shape the draw but mask and temperature.

What a completion must begin with is known before anything is drawn, so it goes to vLLM as the end of the prompt.
"""

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from decoding.legal_table import END, LegalTable
from inference.legal_admission import START_KEY, TABLE_KEY, known_tables
from records.generation import GenerationRequest


def known_head(table: LegalTable) -> tuple[list[int], int]:
    """What any completion must begin with, and the node after it, which has a choice.

    Nothing, where there is no choice at all, or the table has yet to be checked.
    """
    head, start = table.forced(0) if table.is_sound else ([], 0)
    return ([], 0) if start == END else (head, start)


def prompt_ids(request: GenerationRequest) -> list[int]:
    """The prompt, and what any answer to it must begin with."""
    return [*request.prompt_ids, *known_head(request.table)[0]]


def sampling_params(request: GenerationRequest, eos_id: int) -> SamplingParams:
    """Temperature and table of `request`, to go with its `prompt_ids`; the logprob of each drawn token comes back."""
    head, start = known_head(request.table)
    return SamplingParams(
        temperature=request.temperature,
        top_p=1.0,
        top_k=0,
        seed=request.seed,
        max_tokens=request.table.longest - len(head),
        stop_token_ids=[eos_id],
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Made for one request, so vLLM need not copy it in depth.
        skip_clone=True,
        extra_args={TABLE_KEY: known_tables.keep(request.table), START_KEY: start},
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
