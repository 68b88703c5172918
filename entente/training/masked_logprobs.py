"""Log-probabilities of branching tokens over their legal sets (the masked policy), with entropy and KL divergence.

    log pi(a) = z_a / T - log sum_{b legal} exp(z_b / T)        z: logits, T: temperature of the row
    KL_t = sum over a in L of pi(a) (log pi(a) - log ref(a))       H_t = - sum over a in L of pi(a) log pi(a)

KL and entropy are exact sums over the legal set L. The reference is the base model (adapter off), not the behaviour policy;
computed only if its weight is above 0. The softmax is float32, also for a bfloat16 model. Order tokens multiply only the head
rows of legal ids; for thought tokens see thought_logprobs.py.

Hidden states equal those of rows computed one by one, except for rounding. The last layer computes only positions that predict
a branching token. Rotary frequencies follow each row's own positions, also in families that change them with length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entente.training.flex_attention import FlexAttention
from entente.training.micro_batches import MicroBatch, probed
from entente.training.packed_attention import RangeAttention, packed_attention_arguments, to_device, uses_flex
from entente.training.thought_logprobs import chunk_rows, head_logits, thought_figures

TokenFigures = dict[str, Tensor]
"""Per branching token, float32 [branching tokens]:

- `chosen`: log-probability of the sampled token, nats; with gradient
- `entropy`: nats; with gradient only with `entropy_gradient`
- `legal_mass`: probability of the legal set under the unmasked model; NaN if not probed, as all thought tokens
- `kl`: from the reference, nats; with gradient; absent without a reference
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The base model's results on the same micro-batch, for the KL; without gradient."""

    legal: Tensor
    """[order tokens, largest legal set]: log-probabilities, as `legal_ids`; -inf as padding."""
    thought_hidden: Tensor
    """[thought tokens, width]: predict the thought tokens."""


def masked_logprobs(
    causal: Any,
    micro: MicroBatch,
    reference: Reference | None = None,
    *,
    entropy_gradient: bool = False,
    mass_gradient: bool = False,
) -> TokenFigures:
    """`causal`: the model inside the peft model. Raises ValueError for thought tokens if the head is trained."""
    hidden, legal = _legal_logits(causal, micro)
    logprobs = torch.log_softmax(legal, dim=1)
    with torch.set_grad_enabled(mass_gradient and torch.is_grad_enabled()):
        mass = _legal_mass(causal.lm_head, hidden, legal, micro)
    figures = {
        "chosen": torch.gather(logprobs, 1, to_device(micro.chosen, logprobs.device)[:, None])[:, 0],
        "entropy": legal_entropy(logprobs if entropy_gradient else logprobs.detach()),
        "legal_mass": mass,
    }
    if reference is not None:
        figures["kl"] = exact_kl(logprobs, reference.legal)
    if not micro.has_thought:
        return figures
    states = None if reference is None else reference.thought_hidden
    thought = thought_figures(causal.lm_head, _pick(hidden, micro.in_thought), micro, states, entropy_gradient=entropy_gradient)
    thought["legal_mass"] = torch.full_like(thought["chosen"], float("nan"))
    at = to_device(np.argsort(np.argsort(micro.in_thought, kind="stable")), hidden.device)
    return {name: torch.cat([orders, thought[name]]).index_select(0, at) for name, orders in figures.items()}


def reference_of(causal: Any, micro: MicroBatch) -> Reference:
    """The caller has disabled adapter and gradients."""
    hidden, legal = _legal_logits(causal, micro)
    return Reference(legal=torch.log_softmax(legal, dim=1), thought_hidden=_pick(hidden, micro.in_thought))


def _legal_logits(causal: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Hidden states [branching tokens, width]; float32 logits / T [order tokens, largest legal set], -inf as padding."""
    shared = packed_hidden(causal, micro)
    device = shared.device
    logits = legal_logits(causal.lm_head, shared, micro)
    hidden = shared.index_select(0, to_device(micro.token_hidden, device))
    temperature = to_device(micro.temperature[~micro.in_thought], device)[:, None]
    return hidden, (logits / temperature).masked_fill(~to_device(micro.legal_mask, device), float("-inf"))


def _pick(hidden: Tensor, which: np.ndarray) -> Tensor:
    return hidden if which.all() else hidden.index_select(0, to_device(which.nonzero()[0], hidden.device))


def packed_hidden(causal: Any, micro: MicroBatch) -> Tensor:
    """[H, width] at `micro.hidden_at`."""
    device = causal.lm_head.weight.device
    if uses_flex(causal.config):
        attention = packed_attention_arguments(FlexAttention(micro, device), device)
    else:
        ranges = RangeAttention(micro, device)
        attention = packed_attention_arguments(ranges, device, ranges.only(micro.hidden_at))
    at = to_device(micro.hidden_at, device)
    with _last_products_at(causal, at, micro.tokens):
        hidden = causal.model(
            input_ids=to_device(micro.input_ids, device)[None],
            position_ids=to_device(micro.positions, device)[None],
            use_cache=False,
            **attention,
        ).last_hidden_state
    return hidden[0].index_select(0, at)


@contextmanager
def _last_products_at(causal: Any, at: Tensor, tokens: int) -> Iterator[None]:
    """Run the last layer's MLP only for the tokens `at`, int64 [H]; the others get 0.

    No effect with recomputed activations: the last layer runs once more in the backward."""
    if causal.training and torch.is_grad_enabled():
        yield
        return
    part = causal.model.layers[-1].mlp

    def narrow(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].index_select(1, at), *inputs[1:])

    def widen(_: Any, __: Any, output: Tensor) -> Tensor:
        whole = output.new_zeros(output.shape[0], tokens, output.shape[2])
        return whole.index_copy(1, at, output)

    before, after = part.register_forward_pre_hook(narrow), part.register_forward_hook(widen)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def legal_logits(head: torch.nn.Linear, hidden: Tensor, micro: MicroBatch) -> Tensor:
    """float32 [D, K], from only the head rows of the order tokens' legal ids."""
    device = hidden.device
    ids = to_device(micro.head_ids, device)
    bias = None if head.bias is None else head.bias.index_select(0, ids)
    logits = head_logits(hidden, head.weight.index_select(0, ids), bias)
    at = to_device(micro.token_hidden[~micro.in_thought], device)[:, None] * len(ids) + to_device(micro.legal_columns, device)
    return logits.flatten().index_select(0, at.flatten()).view(at.shape)


def _legal_mass(head: Any, hidden: Tensor, legal: Tensor, micro: MicroBatch) -> Tensor:
    """[order tokens]: of the probed ones, from the whole head in chunks; else NaN."""
    (orders,) = (~micro.in_thought).nonzero()
    (probes,) = probed(micro.completion_index[orders]).nonzero()
    at, index = (to_device(values, hidden.device) for values in (orders[probes], probes))
    temperature = to_device(micro.temperature[orders[probes]], hidden.device)[:, None]
    rows = chunk_rows(head)
    chunks = zip(hidden[at].split(rows), temperature.split(rows), strict=True)
    total = torch.cat([torch.logsumexp(head_logits(states, head.weight, head.bias) / heat, dim=1) for states, heat in chunks])
    mass = torch.exp(torch.logsumexp(legal[index], dim=1) - total)
    return torch.full_like(legal[:, 0], float("nan")).index_copy(0, index, mass)


def _expected(values: Tensor, logprobs: Tensor) -> Tensor:
    """Under the policy, [positions]; padding adds 0, also to the gradient."""
    legal = torch.isfinite(logprobs)
    return (torch.where(legal, logprobs, 0.0).exp() * torch.where(legal, values, 0.0) * legal).sum(dim=1)


def legal_entropy(logprobs: Tensor) -> Tensor:
    """Nats [positions]; `logprobs`: [positions, largest legal set] with -inf as padding."""
    return _expected(-torch.where(torch.isfinite(logprobs), logprobs, 0.0), logprobs)


def exact_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Nats [positions]; arguments as in `legal_entropy`."""
    legal = torch.isfinite(logprobs)
    gap = torch.where(legal, logprobs, 0.0) - torch.where(legal, reference, 0.0)
    return _expected(gap, logprobs)
