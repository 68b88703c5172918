"""Log-probabilities of branching tokens over their legal sets (the masked policy).

    log pi(a) = z_a / T - log sum_{b legal} exp(z_b / T)        z: logits, T: temperature of the row

The softmax is computed in float32, also for a bfloat16 model. Packed micro-batches multiply only the rows of the head whose ids
are legal; padded micro-batches, which serve as the oracle, multiply the whole head.
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
    """Log-probabilities of the branching tokens from one forward; float32 [branching tokens], with gradient."""

    chosen: Tensor
    """Log-probability, nats, of the drawn token over its legal set."""
    legal: Tensor
    """[branching tokens, largest legal set]: log-probability of each legal token, as `legal_ids`; -inf as padding."""
    legal_mass: Tensor
    """Probability of the legal set under the unmasked model; NaN for tokens that are not probed."""


def masked_logprobs(
    causal: Any, micro: BranchingTokens, attention: str = "auto", *, mass_gradient: bool = False
) -> MaskedLogprobs:
    """Forward of a packed or a padded micro-batch.

    Args:
        causal: the causal model inside the peft model.
        attention: as in `attention_for`.
        mass_gradient: compute the gradient of the legal mass too.

    Raises:
        TypeError: `micro` is neither packed nor padded.
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
    """[B]: legal mass of the probed tokens, from the whole head; NaN for the others."""
    index = to_device(probed(micro.completion_index).nonzero()[0], hidden.device)
    unmasked = head(hidden[index]).float() / temperature[index]
    mass = torch.exp(torch.logsumexp(legal[index], dim=1) - torch.logsumexp(unmasked, dim=1))
    return torch.full_like(legal[:, 0], float("nan")).index_copy(0, index, mass)
