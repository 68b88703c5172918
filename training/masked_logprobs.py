"""What a forward says of branching tokens: log-probabilities over their legal sets.

    log pi(a) = z_a / T - log sum_{b legal} exp(z_b / T)        (the masked policy; z: logits, T: temperature of the row)

The softmax is float32 whatever the model computes in. Two ways lead to the logits: packed micro-batches take single rows of the
head, padded ones, the oracle, the whole head.
Never: compute a loss.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.branching import BranchingTokens
from training.mass_probe import probed
from training.packed_forward import legal_logits, packed_hidden, to_device
from training.padded_rows import PaddedRows
from training.trie_plan import PackedMicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLogprobs:
    """What one forward says of the branching tokens; all [branching tokens], float32, with their gradients."""

    chosen: Tensor
    """Log-probability, nats, of the drawn token over its legal set."""
    legal: Tensor
    """[branching tokens, largest legal set]: log-probability of every legal token in the order of the row's legal ids, -inf
    beyond them."""
    legal_mass: Tensor
    """Probability that the unmasked model puts on the legal set; no number where it was not probed."""


def masked_logprobs(
    causal: Any, micro: BranchingTokens, attention: str = "auto", *, mass_gradient: bool = False
) -> MaskedLogprobs:
    """Forward of a packed or a padded micro-batch.

    Args:
        causal: the causal model within peft's.
        attention: as in `attention_for`.
        mass_gradient: the legal mass carries its gradient too.
    """
    device = causal.lm_head.weight.device
    if isinstance(micro, PackedMicroBatch):
        shared = packed_hidden(causal, micro, attention)
        logits = legal_logits(causal.lm_head, shared, micro)
        hidden = shared.index_select(0, to_device(micro.token_hidden, device))
    elif isinstance(micro, PaddedRows):
        hidden = _padded_hidden(causal, micro)
        logits = torch.gather(causal.lm_head(hidden).float(), 1, to_device(micro.legal_ids, device))
    else:
        raise TypeError(f"no forward is known for {type(micro).__name__}")
    temperature = to_device(micro.temperature, device)[:, None]
    legal = (logits / temperature).masked_fill(~to_device(micro.legal_mask, device), float("-inf"))
    logprobs = torch.log_softmax(legal, dim=1)
    with torch.set_grad_enabled(mass_gradient and torch.is_grad_enabled()):
        mass = _legal_mass(causal.lm_head, hidden, temperature, legal, micro)
    return MaskedLogprobs(
        chosen=torch.gather(logprobs, 1, to_device(micro.chosen, device)[:, None])[:, 0], legal=logprobs, legal_mass=mass
    )


def _padded_hidden(causal: Any, rows: PaddedRows) -> Tensor:
    """Hidden states [B, width] from a right-padded forward."""
    device = causal.lm_head.weight.device
    hidden = causal.model(
        input_ids=to_device(rows.input_ids, device), attention_mask=to_device(rows.attention_mask, device), use_cache=False
    ).last_hidden_state
    return hidden[to_device(rows.token_row, device), to_device(rows.token_position, device)]


def _legal_mass(head: Any, hidden: Tensor, temperature: Tensor, legal: Tensor, micro: BranchingTokens) -> Tensor:
    """[B]: of the probed tokens, by the whole head; elsewhere no number."""
    at = to_device(probed(micro.completion_index).nonzero()[0], hidden.device)
    everywhere = head(hidden[at]).float() / temperature[at]
    mass = torch.exp(torch.logsumexp(legal[at], dim=1) - torch.logsumexp(everywhere, dim=1))
    return torch.full_like(legal[:, 0], float("nan")).index_copy(0, at, mass)
