"""The budget is what fits; where memory runs out it is halved, and the work done again."""

import pytest
import torch

from telemetry.errors import TrainingError
from training import token_budget
from training.settings import CPU_TOKENS, TrainingSettings
from training.token_budget import LEAST, MOST, TokenBudget, tokens_that_fit

CPU = torch.device("cpu")


def test_a_budget_that_is_given_is_used_and_on_a_cpu_there_is_nothing_to_measure():
    for given, expected in ((0, CPU_TOKENS), (700, 700)):
        budget = TokenBudget(TrainingSettings(token_budget=given), CPU)
        budget.calibrate(lambda tokens: pytest.fail("nothing is measured"))
        assert budget.calibrated and budget.tokens == expected


def test_work_that_runs_out_of_memory_is_done_again_in_halves():
    budget, tried = TokenBudget(TrainingSettings(token_budget=4000), CPU), []

    def work(tokens: int) -> str:
        tried.append(tokens)
        if tokens > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    assert budget.within_memory(work) == "done" and tried == [4000, 2000, 1000]
    assert budget.within_memory(work) == "done" and tried[3:] == [1000]  # the lesson stays


def test_the_smallest_micro_batch_that_does_not_fit_is_an_error_with_a_cure():
    def work(tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TrainingError, match=rf"{LEAST} unique tokens does not fit .* training.recompute"):
        TokenBudget(TrainingSettings(token_budget=4096), CPU).within_memory(work)


def test_other_failures_are_no_lack_of_memory():
    def work(tokens: int) -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        TokenBudget(TrainingSettings(), CPU).within_memory(work)


def test_what_fits_grows_with_the_free_memory_and_keeps_its_bounds():
    assert tokens_that_fit(50e9, 5.6e6) == 6912  # 0.8 * 50e9 / 5.6e6 = 7142 in whole 256s
    assert tokens_that_fit(1e6, 5.6e6) == LEAST and tokens_that_fit(1e15, 5.6e6) == MOST


def test_one_warm_micro_batch_is_measured_and_scaled_to_the_free_memory(monkeypatch: pytest.MonkeyPatch):
    """With a card that says what it is told: 3 GB lie there, 2,000 tokens take 8 GB more at their peak, 40 GB are then free."""
    card = {
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: 3e9,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: 11e9,
        "mem_get_info": lambda device: (30e9, 80e9),
        "memory_reserved": lambda device: 13e9,
        "empty_cache": lambda: None,
    }
    for name, answer in card.items():
        monkeypatch.setattr(token_budget.torch.cuda, name, answer)
    asked = []
    budget = TokenBudget(TrainingSettings(), torch.device("cuda"))
    for _ in range(2):
        budget.calibrate(lambda tokens: asked.append(tokens) or 2000)
    assert asked == [token_budget.WARM_TOKENS] and budget.tokens == 0.8 * 40e9 / 4e6 // 256 * 256
