"""Losses and their slopes, written down once more: plain Python, float64, one token after another, case by case.

Nothing here is imported from `entente.training.losses`, and every slope is written from the formula, not found by differences;
those check this file (tests/training/test_losses.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
OUTLIER_LOW, OUTLIER_HIGH = 1e-4, 100.0
DIVERGENCE = 0.2


@dataclass(frozen=True)
class Token:
    """A drawn token: log-probabilities now, when it was drawn, and of what its ratio is taken against."""

    now: float
    sampled: float
    advantage: float
    decision: int
    against: float | None = None
    weighed: float | None = None
    """Log-probability of which weights without a gradient are made; None: `now`."""

    @property
    def proximal(self) -> float:
        return self.sampled if self.against is None else self.against

    @property
    def is_outlier(self) -> bool:
        return not OUTLIER_LOW <= math.exp(self.now - self.sampled) <= OUTLIER_HIGH


@dataclass(frozen=True)
class Part:
    """What one token adds to the loss, and the slope of the whole loss by its log-probability."""

    loss: float
    slope: float
    guard: str = ""
    """low | high | out: which guard acted."""


def _surrogate(ratio: float, advantage: float) -> tuple[float, float, str]:
    """Loss, its derivative by the ratio, and the guard."""
    if advantage > 0 and ratio > 1 + CLIP_HIGH:
        return -(1 + CLIP_HIGH) * advantage, 0.0, "high"
    if advantage < 0 and ratio < 1 - CLIP_LOW:
        return -(1 - CLIP_LOW) * advantage, 0.0, "low"
    if advantage < 0 and ratio > DUAL_CLIP:
        return -DUAL_CLIP * advantage, 0.0, "high"
    return -ratio * advantage, -advantage, ""


def _weight(gap: float, cap: float) -> float:
    return min(math.exp(gap), cap) if cap else 1.0


def clipped(tokens: Sequence[Token], cap: float = 0.0) -> list[Part]:
    """Clipped ratio of each token, over the number of tokens."""
    parts = []
    for token in tokens:
        ratio = math.exp(token.now - token.proximal)
        loss, by_ratio, guard = _surrogate(ratio, token.advantage)
        weight = _weight(token.proximal - token.sampled, cap) / len(tokens)
        parts.append(Part(0.0, 0.0, "out") if token.is_outlier else Part(weight * loss, weight * by_ratio * ratio, guard))
    return parts


def dppo(tokens: Sequence[Token], cap: float = 0.0) -> list[Part]:
    """Plain ratio of each token, but for those whose probability went too far with their advantage."""
    parts = []
    for token in tokens:
        ratio, moved = math.exp(token.now - token.proximal), math.exp(token.now) - math.exp(token.proximal)
        weight = _weight(token.proximal - token.sampled, cap) / len(tokens)
        if token.is_outlier:
            parts.append(Part(0.0, 0.0, "out"))
        elif token.advantage > 0 and moved > DIVERGENCE:
            parts.append(Part(0.0, 0.0, "high"))
        elif token.advantage < 0 and moved < -DIVERGENCE:
            parts.append(Part(0.0, 0.0, "low"))
        else:
            parts.append(Part(-weight * ratio * token.advantage, -weight * ratio * token.advantage))
    return parts


def cispo(tokens: Sequence[Token], cap: float = 0.0) -> list[Part]:
    """Log-probability of each token, weighed with a clipped ratio that does not move with it."""
    parts = []
    for token in tokens:
        ratio = math.exp((token.now if token.weighed is None else token.weighed) - token.proximal)
        weight = min(ratio, 1 + CLIP_HIGH) * _weight(token.proximal - token.sampled, cap) / len(tokens)
        slope = -weight * token.advantage
        parts.append(Part(0.0, 0.0, "out") if token.is_outlier else Part(slope * token.now, slope))
    return parts


def _by_decision(tokens: Sequence[Token]) -> dict[int, list[int]]:
    decisions: dict[int, list[int]] = {}
    for place, token in enumerate(tokens):
        decisions.setdefault(token.decision, []).append(place)
    return decisions


def sequence_mean(tokens: Sequence[Token], cap: float = 0.0) -> list[Part]:
    """The mean over decisions of the mean over their tokens of the clipped loss."""
    decisions = _by_decision(tokens)
    parts = []
    for token, part in zip(tokens, clipped(tokens, cap), strict=True):
        scale = len(tokens) / len(decisions[token.decision]) / len(decisions)
        parts.append(Part(part.loss * scale, part.slope * scale, part.guard))
    return parts


def gspo(tokens: Sequence[Token], cap: float = 0.0) -> list[Part]:
    """The mean over decisions of the clipped loss of their one ratio, the geometric mean of their tokens' ratios."""
    decisions = _by_decision(tokens)
    parts = [Part(0.0, 0.0, "out")] * len(tokens)
    for places in decisions.values():
        mine = [tokens[place] for place in places]
        if any(token.is_outlier for token in mine):
            continue
        ratio = math.exp(sum(token.now - token.proximal for token in mine) / len(mine))
        weight = _weight(sum(token.proximal - token.sampled for token in mine) / len(mine), cap) / len(decisions)
        loss, by_ratio, guard = _surrogate(ratio, mine[0].advantage)
        for place in places:
            parts[place] = Part(weight * loss / len(mine), weight * by_ratio * ratio / len(mine), guard)
    return parts


ORACLES = {"cispo": cispo, "clipped": clipped, "dppo": dppo, "gspo": gspo, "sequence_mean": sequence_mean}


def masked(logits: Sequence[float], legal: Sequence[int]) -> dict[int, float]:
    """log pi of every legal token: the softmax over the legal set alone."""
    log_sum = math.log(sum(math.exp(logits[token]) for token in legal))
    return {token: logits[token] - log_sum for token in legal}


def legal_mass(logits: Sequence[float], legal: Sequence[int]) -> float:
    """Probability of the legal set under the softmax over all tokens."""
    return sum(math.exp(logits[token]) for token in legal) / sum(math.exp(logit) for logit in logits)


def entropy(policy: dict[int, float]) -> float:
    """Nats."""
    return -sum(math.exp(logprob) * logprob for logprob in policy.values())


def divergence(policy: dict[int, float], reference: dict[int, float]) -> float:
    """KL(policy, reference), nats."""
    return sum(math.exp(logprob) * (logprob - reference[token]) for token, logprob in policy.items())
