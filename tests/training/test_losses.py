"""Every policy loss against a float64 loop in plain Python, value and slope; and the loop's slopes against differences."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entente.training.losses import SampledTokens, policy_loss
from entente.training.settings import LOSSES, TrainingSettings
from tests.training.loss_oracle import ORACLES, Token

EDGES = (1e-4, 0.8, 1.28, 3.0, 100.0)
NAMES = sorted(LOSSES)


@st.composite
def sampled_tokens(draw: st.DrawFn, anchored: bool) -> list[Token]:
    """Some decisions' tokens, in mixed order, none of them on an edge between two cases."""
    tokens = []
    for decision in range(draw(st.integers(1, 5))):
        advantage = draw(st.sampled_from([-3.0, -0.7, 0.4, 2.5]))
        for _ in range(draw(st.integers(1, 5))):
            now, sampled = draw(st.floats(-7, -0.01)), draw(st.floats(-7, -0.01))
            near = draw(st.booleans())  # so that whole decisions stay within the bounds, too
            sampled = min(now + (sampled + 3.5) / 20, -0.001) if near else sampled
            against = draw(st.floats(-7, -0.01)) if anchored else None
            tokens.append(Token(now=now, sampled=sampled, advantage=advantage, decision=decision, against=against))
    assume(not any(near_an_edge(tokens, at) for at in range(len(tokens))))
    return draw(st.permutations(tokens))


def near_an_edge(tokens: list[Token], at: int) -> bool:
    token = tokens[at]
    mine = [other for other in tokens if other.decision == token.decision]
    ratios = [math.exp(token.now - token.sampled), math.exp(token.now - token.proximal)]
    ratios.append(math.exp(sum(other.now - other.proximal for other in mine) / len(mine)))
    moved = abs(math.exp(token.now) - math.exp(token.proximal))
    return any(abs(ratio / edge - 1) < 1e-3 for ratio in ratios for edge in EDGES) or abs(moved - 0.2) < 1e-3


def found(name: str, tokens: list[Token], cap: float, dtype: torch.dtype = torch.float64):
    """Loss per token and slope per token as the trainer computes them, divided by the update's constant."""
    kind = policy_loss(name)
    logprobs = torch.tensor([token.now for token in tokens], dtype=dtype, requires_grad=True)
    anchored = tokens[0].against is not None
    given = SampledTokens(
        logprobs=logprobs,
        behaviour=torch.tensor([token.sampled for token in tokens], dtype=dtype),
        advantages=torch.tensor([token.advantage for token in tokens], dtype=dtype),
        decisions=torch.tensor([7 * token.decision + 3 for token in tokens]),
        proximal=torch.tensor([token.proximal for token in tokens], dtype=dtype) if anchored else None,
    )
    loss = kind.of(given, TrainingSettings(importance_cap=cap))
    divided = loss.loss / kind.denominator(len(tokens), len({token.decision for token in tokens}))
    divided.sum().backward()
    assert logprobs.grad is not None
    return divided.detach(), logprobs.grad, loss


@pytest.mark.parametrize("cap", [0.0, 2.0], ids=["against the sampler", "truncated weights"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_value_and_slope_are_those_of_the_loop(name: str, cap: float, data: st.DataObject):
    tokens = data.draw(sampled_tokens(anchored=cap > 0))
    expected = ORACLES[name](tokens, cap)
    loss, slope, guards = found(name, tokens, cap)
    assert loss.sum().item() == pytest.approx(sum(part.loss for part in expected), rel=1e-9, abs=1e-12)
    assert slope.tolist() == pytest.approx([part.slope for part in expected], rel=1e-9, abs=1e-12)
    acted = [
        "out" if out else "high" if high else "low" if low else ""
        for out, high, low in zip(guards.outlier, guards.clipped_high, guards.clipped_low, strict=True)
    ]
    assert acted == [part.guard for part in expected]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)
@given(data=st.data())
def test_the_loop_s_slopes_are_those_of_differences(name: str, data: st.DataObject):
    cap = data.draw(st.sampled_from([0.0, 2.0]))
    tokens = data.draw(sampled_tokens(anchored=cap > 0))
    at, step = data.draw(st.integers(0, len(tokens) - 1)), 1e-5
    ends = []
    for side in (step, -step):
        moved = [replace(token, now=token.now + side * (place == at), weighed=token.now) for place, token in enumerate(tokens)]
        ends.append(sum(part.loss for part in ORACLES[name](moved, cap)))
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(ORACLES[name](tokens, cap)[at].slope, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_better_decision_is_made_likelier(name: str):
    tokens = [Token(-1.0, -1.0, 3.0, 0), Token(-2.0, -2.0, -0.5, 1)]
    _, slope, _ = found(name, tokens, 0.0)
    assert slope.tolist() == pytest.approx([-3.0 / 2, 0.5 / 2])


@pytest.mark.parametrize("name", ["clipped", "sequence_mean", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (4.0, -1.0, False), (1e3, 1.0, False)],
    ids=["up and good", "up and bad", "down and good", "down and bad", "far up and bad", "outlier"],
)
def test_the_clip_acts_on_the_side_where_the_step_was_already_taken(name: str, ratio: float, advantage: float, moves: bool):
    _, slope, _ = found(name, [Token(-8.0 + math.log(ratio), -8.0, advantage, 0)], 0.0)
    assert bool(slope.abs().sum() > 0) is moves


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_number_is_left_out_and_reaches_no_gradient(name: str):
    tokens = [
        Token(-1.0, -1.0, 1.0, 0),
        Token(-200.0, -1.0, 1.0, 1),
        Token(-0.1, -500.0, 1.0, 2),
        Token(float("nan"), -1.0, 1.0, 3),
    ]
    loss, slope, guards = found(name, tokens, 0.0, torch.float32)
    assert guards.outlier.tolist() == [False, True, True, True]
    assert loss.tolist()[1:] == [0, 0, 0] and slope.tolist()[1:] == [0, 0, 0] and slope[0] < 0


def test_every_loss_that_a_setting_may_name_has_a_loop():
    assert set(LOSSES) == set(ORACLES)
