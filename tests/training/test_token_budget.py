"""The budget is what fits; where memory runs out it is halved, and the work done again."""

import pytest
import torch

from telemetry.errors import TrainingError
from training import token_budget
from training.settings import CPU_TOKENS, TrainingSettings
from training.token_budget import LEAST, MOST, WARM_TOKENS, Measured, TokenBudget, tokens_that_fit

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


def test_the_smallest_micro_batch_that_does_not_fit_is_an_error_with_a_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_budget.gc, "collect", lambda: 0)  # seconds, in a process with many modules

    def work(tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TrainingError, match=rf"{LEAST} unique tokens does not fit .* training.recompute"):
        TokenBudget(TrainingSettings(token_budget=4096), CPU).within_memory(work)


def test_what_fits_is_on_the_line_through_two_sizes_and_keeps_its_bounds():
    small, large = Measured(1024, 8_000_000_000), Measured(2048, 13_000_000_000)  # 3 GB and 4,882,812.5 bytes a token
    assert tokens_that_fit(40e9, small, large) == 7424  # 37e9 / 4,882,812.5 = 7577 in whole 256s
    assert tokens_that_fit(1e6, small, large) == LEAST and tokens_that_fit(1e15, small, large) == MOST


class Meter:
    """A card whose peak is a polynomial of a micro-batch's tokens."""

    share = 1.0
    """Share of the card that the process may take."""

    def __init__(self, free: float, *polynomial: float, batch: int = 10**9) -> None:
        self.free, self.polynomial, self.batch, self.highest = free, polynomial, batch, 0.0
        self.asked: list[int] = []

    def peak(self, tokens: int) -> float:
        return sum(factor * tokens**power for power, factor in enumerate(self.polynomial))

    def warm(self, tokens: int) -> int:
        """One forward and backward; the first compiles, which takes more."""
        tokens = min(tokens, self.batch)
        once = 0.0 if self.asked else 0.3 * self.free
        self.asked.append(tokens)
        if self.peak(tokens) + once > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.highest = max(self.highest, self.peak(tokens) + once)
        return tokens

    def reset(self, device: torch.device) -> None:
        self.highest = 0.0

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """3 GB lie there already; the allocator keeps 5 GB that nobody uses."""
        answers = {
            "synchronize": lambda device: None,
            "memory_allocated": lambda device: 3e9,
            "reset_peak_memory_stats": self.reset,
            "max_memory_allocated": lambda device: 3e9 + self.highest,
            "mem_get_info": lambda device: (self.free - 5e9, 80e9),
            "memory_reserved": lambda device: 8e9,
            "get_per_process_memory_fraction": lambda device: self.share,
            "empty_cache": lambda: None,
        }
        monkeypatch.setattr(token_budget.gc, "collect", lambda: 0)  # seconds, in a process with many modules
        for name, answer in answers.items():
            monkeypatch.setattr(token_budget.torch.cuda, name, answer)


@pytest.mark.parametrize(
    ("meter", "least"),
    [
        pytest.param(Meter(40e9, 0, 4e6), 7900, id="linear"),
        pytest.param(Meter(40e9, 12e9, 4e6), 4864, id="fixed and linear"),
        pytest.param(Meter(40e9, 0, 0, 3000), 2048, id="square"),
        pytest.param(Meter(10e9, 2e9, 6e6), 1024, id="the first size does not fit"),
        pytest.param(Meter(40e9, 1e9, 1e4), MOST, id="as many as there may be"),
    ],
)
def test_the_budget_that_is_found_fits_whatever_the_memory_grows_with(monkeypatch: pytest.MonkeyPatch, meter: Meter, least: int):
    meter.stand_in(monkeypatch)
    budget = TokenBudget(TrainingSettings(), torch.device("cuda"))
    budget.calibrate(meter.warm)
    assert meter.peak(budget.tokens) <= meter.free and least <= budget.tokens <= MOST
    assert budget.tokens >= 2048 or max(meter.asked) == WARM_TOKENS
    asked = len(meter.asked)
    budget.calibrate(meter.warm)
    assert len(meter.asked) == asked, "it is measured once"


def test_a_batch_of_few_tokens_leaves_the_budget_to_the_line_and_what_worked_is_the_floor(monkeypatch: pytest.MonkeyPatch):
    meter = Meter(40e9, 0, 1e6, 1000, batch=3000)
    meter.stand_in(monkeypatch)
    budget = TokenBudget(TrainingSettings(), torch.device("cuda"))
    budget.calibrate(meter.warm)
    assert meter.asked[-1] == 3000 and meter.peak(budget.tokens) > meter.free
    meter.batch = 10**9
    assert budget.within_memory(meter.warm) == budget.tokens and budget.tokens >= 3000 and meter.peak(budget.tokens) <= meter.free
    meter.free = meter.peak(1500)
    assert budget.within_memory(meter.warm) == budget.tokens <= 1500, "memory that another process took is noticed"
