"""The imitation loss, and metrics on held-out games.

    loss = sum_d sum_t w_t CE_t / sum_d sum_t w_t     w_t = 1 for a completion token, prompt_weight for a prompt token

over decisions d and their tokens t after the first. CE_t is over the full vocabulary, so that the
unmasked model also learns to put probability on legal tokens. Forward passes share prefixes, but a shared prompt token counts
once per decision, so packing does not change the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from entente.training.imitation.examples import Example, predicts_all, predicts_orders
from entente.training.masked_logprobs import packed_hidden
from entente.training.micro_batches import MicroBatch, plan
from entente.training.settings import CPU_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFigures:
    completion_loss: float
    """Over the full vocabulary, nats per completion token."""
    order_loss: float
    """Over the legal set, nats per order token; tokens with one legal choice are excluded."""
    orders_equal: float
    """Share of orders whose every token is the most likely legal one under teacher forcing."""
    by_order: np.ndarray
    """bool [orders]: `orders_equal` of each order, one example after another."""
    example: np.ndarray
    """int [orders]: the example of each order."""


def backward(model: Any, examples: Sequence[Example], prompt_weight: float) -> tuple[float, int]:
    """Accumulate the gradient of the loss; return the loss and the number of unique tokens computed."""
    weights = np.concatenate([np.where(np.arange(1, len(each.ids)) < each.prompt, prompt_weight, 1.0) for each in examples])
    total, tokens, weights = 0.0, 0, weights / weights.sum()
    for micro in plan(predicts_all(examples), range(len(examples)), CPU_TOKENS):
        loss = _weighted_sum(model, packed_hidden(model, micro), micro, weights[micro.completion_index])
        loss.backward()
        total += float(loss.detach())
        tokens += micro.tokens
    return total, tokens


def _weighted_sum(model: Any, states: torch.Tensor, micro: MicroBatch, weights: np.ndarray) -> torch.Tensor:
    """Sum of weighted cross-entropies; `states`: [H, width], `weights`: float64 [B]."""
    vocabulary = model.config.vocab_size
    # Decisions that share a prefix and the next token share the hidden state and the target: they become one weighted term.
    terms, place = np.unique(micro.token_hidden * vocabulary + micro.legal_ids[:, 0], return_inverse=True)
    weight = torch.from_numpy(np.bincount(place, weights).astype(np.float32))
    hidden, target = torch.from_numpy(terms // vocabulary), torch.from_numpy(terms % vocabulary)
    logits = model.lm_head(states).float()
    return torch.nn.functional.cross_entropy(logits.index_select(0, hidden), target, reduction="none") @ weight


@torch.no_grad()
def measure(model: Any, examples: Sequence[Example], separator: int) -> HeldOutFigures:
    """Metrics on `examples`, which must have legal sets; `separator`: id of the token between two orders."""
    batch, forced = predicts_orders(examples)
    losses, legal_losses, equal = (np.zeros(len(forced)) for _ in range(3))
    for micro in plan(batch, range(len(examples)), CPU_TOKENS):
        logits = model.lm_head(packed_hidden(model, micro)).float()[torch.from_numpy(micro.token_hidden)]
        legal = logits.gather(1, torch.from_numpy(micro.legal_ids))
        legal = legal.masked_fill(~torch.from_numpy(micro.legal_mask), -torch.inf)
        chosen = torch.from_numpy(micro.chosen)
        sampled = legal.gather(1, chosen[:, None])[:, 0]
        losses[micro.completion_index] = (logits.logsumexp(1) - sampled).numpy()
        legal_losses[micro.completion_index] = (legal.logsumexp(1) - sampled).numpy()
        equal[micro.completion_index] = (legal.argmax(1) == chosen).numpy()
    order = _order_numbers(examples, separator)
    by_order = np.bincount(order, weights=1 - equal) == 0
    owner = np.repeat(np.arange(len(examples)), [example.orders for example in examples])
    return HeldOutFigures(
        completion_loss=float(losses.mean()),
        order_loss=float(legal_losses[~forced].mean()),
        orders_equal=float(by_order.mean()),
        by_order=by_order,
        example=owner[np.flatnonzero(np.diff(order, append=-1))],
    )


def _order_numbers(examples: Sequence[Example], separator: int) -> np.ndarray:
    """Index of each token's order over all examples; a separator or end token belongs to the order before it."""
    ends = [each.ids[-each.orders :] == separator for each in examples]
    for each in ends:
        each[-1] = True
    after = np.concatenate(ends)
    return np.cumsum(after) - after
