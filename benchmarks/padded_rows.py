"""Padded rows, the reference for the packed forward: each row separately, with the whole head and a full mask.

Shares no code with the packed forward and is several times slower. Only tests and benchmarks use it."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from entente.training.micro_batches import plan
from entente.training.packed_attention import use_packed_attention
from entente.training.policy import Policy
from entente.training.thought_logprobs import head_logits
from storage.gather import Batch

TOLERANCES = {
    ("cpu", "float32"): (1e-5, 1e-4),
    ("cuda", "float32"): (1e-4, 1e-3),
    ("cpu", "bfloat16"): (0.02, 0.1),
    ("cuda", "bfloat16"): (0.05, 0.2),
}
"""Maximum `differences` by device and dtype. In float32 on a CPU the gradient error is 1e-6 for a tiny model, 1.1e-5 for the 30
blocks of SmolLM2. In bfloat16 1e-4 and 2e-2 are typical for a small model, more for a deep one."""
ROWS_EACH = 32
Logprobs = tuple[np.ndarray, Tensor]
"""Branching tokens: int64 [B], their completion positions in the batch; float32 [B], their log-probabilities, with gradient."""


def differences(policy: Policy, batch: Batch, rows: Sequence[int], token_budget: int = 4096) -> tuple[float, float]:
    """Difference between packed micro-batches and padded rows, in a weighted mean of log-probabilities: absolute, nats per
    branching token; and relative error of its gradient. Token weights differ, because equal ones would hide swapped tokens."""
    return _difference(policy, _packed_logprobs(policy, batch, rows, token_budget), padded_logprobs(policy, batch, rows))


def flex_differences(policy: Policy, batch: Batch, rows: Sequence[int], token_budget: int) -> tuple[float, float]:
    """As `differences`, of packed rows with flex_attention from those with ranges, which the policy has afterwards."""

    def with_attention(kind: Literal["ranges", "flex"]) -> Iterator[Logprobs]:
        use_packed_attention(policy.model.config, kind)
        yield from _packed_logprobs(policy, batch, rows, token_budget)

    return _difference(policy, with_attention("flex"), with_attention("ranges"))


def _packed_logprobs(policy: Policy, batch: Batch, rows: Sequence[int], token_budget: int) -> Iterator[Logprobs]:
    for micro in plan(batch, rows, token_budget):
        yield micro.completion_index, policy.masked_logprobs(micro)["chosen"]


def tolerances(policy: Policy, batch: Batch, rows: Sequence[int]) -> tuple[float, float]:
    """Maximum `differences` of a correct packed forward: `TOLERANCES`, or three times the difference between padded rows computed
    one by one and together, because rounding grows with the depth of a model."""
    dtype = str(policy.model.dtype).removeprefix("torch.")
    together = padded_logprobs(policy, batch, rows)
    gaps = _difference(policy, padded_logprobs(policy, batch, rows, rows_each=1), together)
    known = TOLERANCES[policy.device.type, dtype]
    return max(known[0], 3 * gaps[0]), max(known[1], 3 * gaps[1])


def _difference(policy: Policy, parts: Iterable[Logprobs], reference: Iterable[Logprobs]) -> tuple[float, float]:
    (one, gradient), (other, expected) = (_weighted_mean(policy, each) for each in (parts, reference))
    return abs(one - other), float((gradient - expected).norm() / expected.norm())


def _weighted_mean(policy: Policy, parts: Iterable[Logprobs]) -> tuple[float, Tensor]:
    weights, total, count = policy.parameters(), 0.0, 0
    gradient = torch.zeros(sum(weight.numel() for weight in weights), device=policy.device)
    for index, logprobs in parts:
        part = (logprobs * torch.from_numpy(np.cos(index).astype(np.float32)).to(policy.device)).sum()
        gradient += torch.cat([each.flatten() for each in torch.autograd.grad(part, weights)])
        total += float(part.detach())
        count += len(index)
    return total / count, gradient / count


def padded_logprobs(policy: Policy, batch: Batch, rows: Sequence[int], *, rows_each: int = ROWS_EACH) -> Iterator[Logprobs]:
    """The branching tokens of `rows`, in order; `rows_each` rows per forward."""
    causal: Any = policy.model.base_model.model
    for first in range(0, len(rows), rows_each):
        some = rows[first : first + rows_each]
        ids, mask = (torch.from_numpy(values).to(policy.device) for values in pad(batch, some))
        tokens = [token for number, row in enumerate(some) for token in _branching_tokens(batch, number, row)]
        if not tokens:
            continue
        index, number, position, legal = zip(*tokens, strict=True)
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=causal.lm_head.weight.dtype == torch.bfloat16):
            states = causal.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        logits = head_logits(states[number, np.array(position) - 1], causal.lm_head.weight, causal.lm_head.bias)
        heat = torch.from_numpy(batch.temperatures[[some[each] for each in number]]).to(policy.device)
        sets = torch.zeros_like(logits, dtype=torch.bool)
        for token, allowed in enumerate(legal):
            sets[token, allowed] = True
        over = torch.log_softmax((logits / heat[:, None]).masked_fill(~sets, float("-inf")), dim=1)
        yield np.array(index), over[range(len(index)), ids[number, position]]


def _branching_tokens(batch: Batch, number: int, row: int) -> Iterator[tuple[int, int, int, list[int]]]:
    """Completion position, `number`, position in the row, and legal ids of each."""
    for place in range(batch.completion_offsets[row], batch.completion_offsets[row + 1]):
        legal = batch.legal_ids[batch.legal_offsets[place] : batch.legal_offsets[place + 1]].tolist()
        if legal[0] < 0:  # an open set
            legal = [token for token in range(legal[1]) if token not in (-1 - legal[0], *legal[2:])]
        if len(legal) > 1:
            yield place, number, int(batch.prompt_lens[row] + place - batch.completion_offsets[row]), legal


def pad(batch: Batch, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded token ids, int64 [rows, longest], and their mask, 0 for padding."""
    lengths = np.diff(batch.input_offsets)[list(rows)]
    ids = np.zeros((len(rows), int(lengths.max())), np.int64)
    mask = np.zeros_like(ids)
    for here, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[here, :length] = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]]
        mask[here, :length] = 1
    return ids, mask
