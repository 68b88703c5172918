"""Tokens that must follow a drawn one are taken with it, inside vLLM, instead of a forward pass each.

More than half of the tokens of an order set are the only legal ones at their place. vLLM's scheduler knows no phases: a request
has tokens, has computed some of them, and a pass computes the rest. So it is enough that the model runner, where it notes the
token that it drew, notes with it what must follow. The next pass computes them together, the next choice is drawn after the last
of them, and an answer whose rest is forced has ended. Probability 1, logprob 0, nothing thrown: the policy is the same.

vLLM mixes `ForcedJump` into its workers by name (`worker_extension_cls`). It takes the place of one method of the V1 runner,
which must not work ahead of tokens that it has yet to see (asynchronous scheduling).
"""

from functools import partial
from typing import Any

import numpy as np
from vllm.v1.outputs import LogprobsLists

from inference.legal_processor import LegalOrderProcessor
from inference.legal_rows import LegalRows

EXTENSION = "inference.forced_jump.ForcedJump"


class ForcedJump:
    """What the engine may ask of each of vLLM's workers."""

    model_runner: Any

    def jump_forced_tokens(self, on: bool) -> str:
        """Jump from now on, or not; nothing may be in flight. Returns why it cannot, or an empty text."""
        runner = self.model_runner
        note = getattr(type(runner), "_bookkeeping_sync", None)
        if note is None or not hasattr(runner.input_batch, "logitsprocs"):
            return "its model runner is not the one that is known (V1)"
        if runner.use_async_scheduling:
            return "it schedules asynchronously: the next pass is planned before a token is seen"
        if runner.speculative_config is not None or runner.parallel_config.pipeline_parallel_size > 1:
            return "it speculates, or its layers lie on several devices"
        rows = next(each.rows for each in runner.input_batch.logitsprocs.all if isinstance(each, LegalOrderProcessor))
        rows.walk_here(on)
        plain = partial(note, runner)
        runner._bookkeeping_sync = partial(_note_and_jump, runner, plain, rows, _room(runner)) if on else plain
        return ""


def _room(runner: Any) -> int:
    """Tokens that a row may jump over if every other row does as well: a pass must hold them whole.

    Some thirty by default, where a line of an order set has at most ten: only settings that leave less make a row draw otherwise.
    """
    scheduling = runner.vllm_config.scheduler_config
    room = scheduling.max_num_batched_tokens // scheduling.max_num_seqs
    if scheduling.long_prefill_token_threshold:
        room = min(room, scheduling.long_prefill_token_threshold)
    return max(0, room - 1)


def _note_and_jump(runner: Any, plain: Any, rows: LegalRows, room: int, *arguments: Any) -> Any:
    """The runner's own notes of a pass, and then what must follow each token that it drew."""
    notes = plain(*arguments)
    nans, nans_on_device, logprobs, sampled, *others = notes
    jumps = rows.jump(room)
    if not jumps:
        return notes
    batch = runner.input_batch
    for row, tokens in jumps.items():
        start = int(batch.num_tokens_no_spec[row])
        end = start + len(tokens)
        batch.token_ids_cpu[row, start:end] = tokens
        batch.is_token_ids[row, start:end] = True
        batch.num_tokens_no_spec[row] = end
        sampled[row] += tokens
    return nans, nans_on_device, None if logprobs is None else _with_certain(logprobs, jumps), sampled, *others


def _with_certain(logprobs: LogprobsLists, jumps: dict[int, list[int]]) -> LogprobsLists:
    """The logprobs of the drawn tokens, one a row, and 0 for each that follows of itself."""
    counts = np.ones(len(logprobs.logprobs), np.int64)
    counts[list(jumps)] += [len(tokens) for tokens in jumps.values()]
    starts = np.cumsum(counts) - counts
    ids = np.repeat(logprobs.logprob_token_ids, counts, axis=0)
    values = np.repeat(logprobs.logprobs, counts, axis=0)
    ranks = np.repeat(logprobs.sampled_token_ranks, counts)
    for row, tokens in jumps.items():
        certain = slice(starts[row] + 1, starts[row] + 1 + len(tokens))
        ids[certain, 0], values[certain, 0], ranks[certain] = tokens, 0.0, 1
    return LogprobsLists(ids, values, ranks, starts.tolist())
