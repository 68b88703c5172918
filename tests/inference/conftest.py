"""Adapters as a trainer would publish them."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def make_adapter(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write an adapter of random weights for the small model: `make_adapter(seed=1, scale=0.3)`."""
    import torch

    from training.policy import Policy
    from training.settings import TrainingSettings

    def make(*, seed: int, scale: float, rank: int = 8) -> Path:
        policy = Policy(model, TrainingSettings(lora_rank=rank, lora_alpha=2 * rank))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.copy_(scale * torch.randn_like(parameter))
        folder = tmp_path / f"adapter-{seed}"
        policy.save_adapter(folder)
        return folder

    return make
