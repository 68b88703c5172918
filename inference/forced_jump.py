"""Appends forced tokens to a drawn token inside vLLM, instead of one forward pass for each.

More than half of the tokens of an order set are the only legal ones at their position. vLLM's scheduler sees a request as a
list of tokens, some of which are computed; a pass computes the rest. So the model runner appends the forced tokens when it
records the drawn one. The next pass computes all of them, and the next token is drawn after the last. A forced token has
probability 1 and log-probability 0, and uses no random number, so the policy is unchanged.

vLLM mixes `ForcedJump` into its workers by name (`worker_extension_cls`). It wraps one private method of the V1 runner, whose
number of results is checked first. Asynchronous scheduling must be off, because it plans a pass before the last token is known.
"""

from functools import partial
from inspect import get_annotations
from typing import Any, get_args

import numpy as np
from vllm.v1.outputs import LogprobsLists

from inference.legal_processor import LegalOrderProcessor
from inference.legal_rows import LegalRows

EXTENSION = "inference.forced_jump.ForcedJump"
_RESULTS = 8
"""Results of the wrapped method, which are taken apart by position: eight in vLLM 0.32, seven in 0.26."""


class ForcedJump:
    """Methods added to each vLLM worker."""

    model_runner: Any

    def jump_forced_tokens(self, on: bool) -> str:
        """Switch jumping on or off, with no request in flight. Returns the reason if it cannot, else an empty text."""
        runner = self.model_runner
        bookkeeping = getattr(type(runner), "_bookkeeping_sync", None)
        if bookkeeping is None or not hasattr(runner.input_batch, "logitsprocs"):
            return "its model runner is not the known one (V1)"
        results = len(get_args(get_annotations(bookkeeping).get("return")))
        if results != _RESULTS:
            return f"its runner's bookkeeping returns {results or 'an unknown number of'} results, not the known {_RESULTS}"
        if runner.use_async_scheduling:
            return "it schedules asynchronously, so the next pass is planned before a token is known"
        if runner.speculative_config is not None or runner.parallel_config.pipeline_parallel_size > 1:
            return "it speculates, or its layers are on several devices"
        rows = next(each.rows for each in runner.input_batch.logitsprocs.all if isinstance(each, LegalOrderProcessor))
        rows.walk_on_host(on)
        plain = partial(bookkeeping, runner)
        runner._bookkeeping_sync = partial(_bookkeep_and_jump, runner, plain, rows, _jump_limit(runner)) if on else plain
        return ""


def _jump_limit(runner: Any) -> int:
    """Forced tokens that each row may append at a time, so that one pass can hold those of all rows.

    About thirty with default settings; the forced part of an order has at most ten.
    """
    scheduling = runner.vllm_config.scheduler_config
    room = scheduling.max_num_batched_tokens // scheduling.max_num_seqs
    if scheduling.long_prefill_token_threshold:
        room = min(room, scheduling.long_prefill_token_threshold)
    return max(0, room - 1)


def _bookkeep_and_jump(runner: Any, plain: Any, rows: LegalRows, room: int, *arguments: Any) -> Any:
    """The runner's own bookkeeping of a pass, with the forced tokens after each drawn token."""
    result = plain(*arguments)
    nans, nans_on_device, logprobs, sampled, *others = result
    jumps = rows.jump(room)
    if not jumps:
        return result
    batch = runner.input_batch
    for row, tokens in jumps.items():
        start = int(batch.num_tokens_no_spec[row])
        end = start + len(tokens)
        batch.token_ids_cpu[row, start:end] = tokens
        batch.is_token_ids[row, start:end] = True
        batch.num_tokens_no_spec[row] = end
        sampled[row] += tokens
    return nans, nans_on_device, None if logprobs is None else _add_forced_logprobs(logprobs, jumps), sampled, *others


def _add_forced_logprobs(logprobs: LogprobsLists, jumps: dict[int, list[int]]) -> LogprobsLists:
    """Log-probabilities of the drawn tokens, one a row, each followed by 0 for its forced tokens."""
    counts = np.ones(len(logprobs.logprobs), np.int64)
    counts[list(jumps)] += [len(tokens) for tokens in jumps.values()]
    starts = np.cumsum(counts) - counts
    ids = np.repeat(logprobs.logprob_token_ids, counts, axis=0)
    values = np.repeat(logprobs.logprobs, counts, axis=0)
    ranks = np.repeat(logprobs.sampled_token_ranks, counts)
    for row, tokens in jumps.items():
        forced = slice(starts[row] + 1, starts[row] + 1 + len(tokens))
        ids[forced, 0], values[forced, 0], ranks[forced] = tokens, 0.0, 1
    return LogprobsLists(ids, values, ranks, starts.tolist())
