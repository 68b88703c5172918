"""The loss is that of separate prompts, with the weights of its formula; what is measured is what plain loops find."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from entente.decoding.codec import Codec
from entente.training.imitation import loss
from entente.training.imitation.examples import Example, predicts_all
from entente.training.imitation.loss import backward, measure
from entente.training.micro_batches import plan


@pytest.fixture
def net(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()


def separate_loss(net: Any, examples: list[Example], prompt_weight: float) -> torch.Tensor:
    """The formula, each prompt alone."""
    total, whole = torch.zeros(()), 0.0
    for example in examples:
        ids = torch.tensor([example.ids.tolist()])
        entropies = torch.nn.functional.cross_entropy(net(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
        weights = [prompt_weight if place < example.prompt else 1.0 for place in range(1, len(example.ids))]
        total, whole = total + entropies @ torch.tensor(weights), whole + sum(weights)
    return total / whole


@pytest.mark.parametrize("budget", [4096, 300], ids=["one micro-batch", "many"])
def test_loss_and_gradient_are_those_of_separate_prompts(
    net: Any, examples: list[Example], budget: int, monkeypatch: pytest.MonkeyPatch
):
    some = examples[:3] + examples[-7:-4]
    expected = separate_loss(net, some, 0.2)
    expected.backward()
    wanted = {name: weight.grad.clone() for name, weight in net.named_parameters()}
    net.zero_grad()
    monkeypatch.setattr(loss, "CPU_TOKENS", budget)
    packed = plan(predicts_all(some), range(len(some)), budget)
    assert (len(packed) > 1) == (budget == 300)
    found, tokens = backward(net, some, 0.2)
    assert found == pytest.approx(expected.item(), abs=1e-5) and tokens == sum(micro.tokens for micro in packed)
    for name, weight in net.named_parameters():
        assert torch.allclose(weight.grad, wanted[name], atol=2e-6), name


def test_what_is_measured_is_what_plain_loops_find(net: Any, examples: list[Example], model: Path):
    separator, losses, legal_losses, equal = Codec(model).separator_id, [], [], []
    for example in examples:
        ids, begin = example.ids.tolist(), len(example.ids) - example.orders
        logits, right = net(input_ids=torch.tensor([ids])).logits[0].detach(), True
        for place in range(example.orders):
            token, row = ids[begin + place], logits[begin + place - 1]
            legal = example.legal_ids[example.legal_offsets[place] : example.legal_offsets[place + 1]].tolist()
            losses.append(float(row.logsumexp(0) - row[token]))
            if len(legal) > 1:
                legal_losses.append(float(row[legal].logsumexp(0) - row[token]))
                right &= max(legal, key=lambda each: float(row[each])) == token
            if token == separator or place == example.orders - 1:
                equal.append(right)
                right = True
    found = measure(net, examples, separator)
    assert found.completion_loss == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert found.order_loss == pytest.approx(sum(legal_losses) / len(legal_losses), abs=1e-5)
    assert found.by_order.tolist() == equal and found.orders_equal == pytest.approx(sum(equal) / len(equal))
    orders = [int((example.ids[-example.orders :] == separator).sum()) + 1 for example in examples]
    assert np.bincount(found.example).tolist() == orders
    assert 0 < found.orders_equal < 1
