"""TRL's loss values as a second opinion on ours, and its slopes. TRL comes with the extra `trl`; without it this is skipped.

Only what both have is compared: TRL has no DPPO mask, estimates the divergence from samples, and knows no legal sets.
"""

import random
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.losses.choose import LOSSES
from training.losses.token_loss import DrawnTokens
from training.settings import TrainingSettings

SETTINGS = TrainingSettings()
SAME = {
    "clipped": {"loss_type": "bnpo", "importance_sampling_level": "token"},
    "sequence_mean": {"loss_type": "grpo", "importance_sampling_level": "token"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}
"""Our names, and what TRL calls the same."""


@pytest.fixture(scope="module")
def grpo() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason="TRL is not installed: the extra `trl` brings it")
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


class Alone:
    """TRL's accelerator, of one process."""

    num_processes, sync_gradients = 1, True

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def reduce(self, value: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return value


def by_trl(
    grpo: Any, name: str, now: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, weights: Any
) -> torch.Tensor:
    """The loss of TRL's own code, given log-probabilities instead of a model."""
    told = SimpleNamespace(
        **SAME[name],
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        beta=0.0,
        epsilon_low=SETTINGS.clip_low,
        epsilon_high=SETTINGS.clip_high,
        args=SimpleNamespace(delta=SETTINGS.dual_clip),
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        current_gradient_accumulation_steps=1,
        accelerator=Alone(),
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros_like(mask)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": mask[:, :1], "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": advantages, "old_per_token_logps": old, "importance_sampling_ratio": weights}
    return grpo._compute_loss(told, None, inputs)


@pytest.mark.parametrize("cap", [0.0, 2.0], ids=["against the sampler", "truncated weights"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SAME)
def test_ours_is_what_trl_computes(grpo, name: str, seed: int, cap: float):
    if cap and name == "gspo":
        pytest.skip("TRL weighs each token of a decision by its own weight, where ours has one for the decision")
    dice = random.Random(seed)
    sizes = [dice.randint(1, 6) for _ in range(5)]
    shape = (len(sizes), max(sizes))
    mask = torch.tensor([[int(place < size) for place in range(shape[1])] for size in sizes])
    now = torch.tensor([[-3 * dice.random() for _ in range(shape[1])] for _ in sizes], dtype=torch.float64, requires_grad=True)
    drawn = now.detach() + torch.tensor([[dice.gauss(0, 0.8) for _ in range(shape[1])] for _ in sizes])
    anchor = drawn + torch.tensor([[dice.gauss(0, 0.8) for _ in range(shape[1])] for _ in sizes]) if cap else drawn
    advantages = torch.tensor([dice.gauss(0, 2) for _ in sizes], dtype=torch.float64)
    weights = torch.exp(anchor - drawn).clamp(max=cap) if cap else None
    theirs = by_trl(grpo, name, now, anchor, mask, advantages, weights)
    (slope,) = torch.autograd.grad(theirs, now)
    at = mask.bool()
    decisions = torch.arange(len(sizes))[:, None].expand(shape)
    tokens = DrawnTokens(
        logprobs=now[at],
        behaviour=drawn[at],
        advantages=advantages[:, None].expand(shape)[at],
        decisions=decisions[at],
        anchor=anchor[at] if cap else None,
    )
    kind = LOSSES[name]
    loss = kind.of(tokens, SETTINGS.model_copy(update={"importance_cap": cap})).loss.sum()
    ours = loss / kind.denominator(int(mask.sum()), len(sizes))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(torch.autograd.grad(ours, now)[0], slope, rtol=1e-9, atol=1e-12)
