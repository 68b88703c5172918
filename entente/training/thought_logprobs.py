"""Log-probability, entropy and KL divergence of thought tokens over their open sets.

    log pi(a) = z_a / T - log sum_{b in the open set} exp(z_b / T)        z: logits, T: temperature of the row

An open set is nearly the whole vocabulary, so tokens are computed in chunks, and with them the gradients by the hidden states:
only one chunk's logits are in memory, and the backward recomputes none. Head and softmax are float32, also for a bfloat16 model.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from entente.training.fused_layers import no_autocast
from entente.training.micro_batches import MicroBatch

CHUNK_LOGITS = 2**24
"""64 MiB in float32; a chunk has at least one token."""
_OUTSIDE = -1e30
"""Logit outside the open set: probability exactly 0, and unlike -inf no NaN when multiplied by 0."""


def thought_figures(
    head: Any, hidden: Tensor, micro: MicroBatch, reference: Tensor | None, *, entropy_gradient: bool
) -> dict[str, Tensor]:
    """`chosen`, `entropy` and, with a reference, `kl` of the thought tokens, float32 [E], as in `TokenFigures`.

    Args:
        hidden: [E, width] hidden states that predict the thought tokens.
        reference: [E, width] those of the base model; None: no KL.

    Raises:
        ValueError: the head is trained; its gradient would be missing.
    """
    if any(weight.requires_grad for weight in head.parameters()):
        raise ValueError("thought tokens are trained on only while the head is frozen: leave it out of the adapter")
    sloped: list[str] = []
    if torch.is_grad_enabled() and hidden.requires_grad:
        sloped = ["chosen", *(["entropy"] if entropy_gradient else []), *(["kl"] if reference is not None else [])]
    arrays = (micro.temperature[micro.in_thought], micro.thought_ids, micro.excluded, micro.end)
    inputs = [hidden.detach(), *(torch.from_numpy(values).to(hidden.device) for values in arrays)]
    inputs += [] if reference is None else [reference]
    rows = chunk_rows(head)
    chunks = [_chunk(head, sloped, *parts) for parts in zip(*(values.split(rows) for values in inputs), strict=True)]
    figures = {name: torch.cat([values[name] for values, _ in chunks]) for name in chunks[0][0]}
    for name in sloped:
        figures[name] = _WithSlopes.apply(hidden, figures[name], torch.cat([slopes[name] for _, slopes in chunks]))
    return figures


def chunk_rows(head: Any) -> int:
    """Tokens whose full logits may be in memory at once."""
    return max(1, CHUNK_LOGITS // head.weight.shape[0])


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """float32 [..., rows of `weight`], also for a bfloat16 model and under autocast, as the engines compute their heads.

    Bfloat16 logits of 16 to 32 are multiples of 0.125, and their log-probabilities would be off by as much. `weight` is converted
    for the product: 1.5 GB for the whole head of a vocabulary of 152,000 and a width of 2,560.
    """
    with no_autocast(hidden):
        return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _chunk(
    head: Any,
    sloped: list[str],
    hidden: Tensor,
    temperature: Tensor,
    sampled: Tensor,
    excluded: Tensor,
    end: Tensor,
    reference: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Figures [tokens], and gradients by `hidden` of those in `sloped`, [tokens, width]."""

    def logprobs_of(states: Tensor) -> Tensor:
        logits = head_logits(states, head.weight, head.bias) / temperature[:, None]
        outside = torch.arange(logits.shape[1], device=logits.device) >= end[:, None]
        return torch.log_softmax(logits.masked_fill(outside.scatter_(1, excluded, True), _OUTSIDE), dim=1)

    hidden.requires_grad_(bool(sloped))
    logprobs = logprobs_of(hidden)
    probabilities = logprobs.exp()
    figures = {"chosen": logprobs.gather(1, sampled[:, None])[:, 0], "entropy": -(probabilities * logprobs).sum(dim=1)}
    if reference is not None:
        figures["kl"] = (probabilities * (logprobs - logprobs_of(reference))).sum(dim=1)
    # A token's figures depend on its own hidden state alone, so the gradient of their sum has the gradient of each in its row.
    slopes = {name: torch.autograd.grad(figures[name].sum(), hidden, retain_graph=True)[0] for name in sloped}
    return {name: values.detach() for name, values in figures.items()}, slopes


class _WithSlopes(torch.autograd.Function):
    """Values [E] with known gradients: value i depends on row i alone, with gradient `slopes[i]`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (slopes,) = ctx.saved_tensors
        return (gradient[:, None] * slopes).to(slopes.dtype), None, None
