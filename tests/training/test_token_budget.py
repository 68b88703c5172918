"""The budget is what fits; where memory runs out it is halved, and the work done again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entente.telemetry.errors import TrainingError
from entente.training import layout
from entente.training.layout import LEAST_TOKENS, Layout
from entente.training.settings import CPU_TOKENS, GPU_TOKENS, TrainingSettings


def budget_of(tokens: int, device: str = "cpu", *, fixed: bool = False) -> Layout:
    policy: Any = SimpleNamespace(device=torch.device(device))
    return Layout(policy, TrainingSettings(layout="padded", token_budget=tokens), fixed=fixed)


def test_a_budget_that_is_given_is_used():
    for device, given, expected in (("cpu", 0, CPU_TOKENS), ("cuda", 0, GPU_TOKENS), ("cuda", 700, 700)):
        assert budget_of(given, device).tokens == expected


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_smallest_micro_batch_that_does_not_fit_is_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout.gc, "collect", lambda: 0)  # seconds, in a process with many modules

    with pytest.raises(TrainingError, match=rf"{LEAST_TOKENS} unique tokens does not fit .* training.recompute"):
        budget_of(4096).within_memory(out_of_memory)


def test_processes_that_split_the_base_do_not_repeat_a_forward():
    with pytest.raises(TrainingError, match=r"4096 unique tokens does not fit .* lower training.token_budget"):
        budget_of(0, fixed=True).within_memory(out_of_memory)
