"""What stages measure is what they say, and what is wrong fails them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.smoke import trainer_stages
from benchmarks.smoke.engine_stages import check_sampled, make_requests, rate, reference_logprobs, sample
from benchmarks.smoke.job import Job, StageFailed
from benchmarks.smoke.trainer_stages import attention, compare_attentions, try_budgets
from benchmarks.trainer_cases import Case
from entente.inference.uniform_engine import UniformEngine
from entente.telemetry.errors import TrainingError
from entente.training import masked_logprobs
from entente.training.micro_batches import MicroBatch
from entente.training.packed_attention import RangeAttention
from entente.training.policy import Policy


@pytest.fixture
def job(tmp_path: Path, model: Path) -> Job:
    return Job(device="cpu", model=str(model), folder=tmp_path)


@pytest.fixture(scope="module")
def sampled(model: Path) -> Any:
    """Real requests and legal completions, drawn uniformly."""
    requests = make_requests(model, 12, "r")
    return list(zip(requests, asyncio.run(sample(UniformEngine(), requests)), strict=True))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def test_requests_are_of_several_positions_and_both_phases(model: Path):
    requests = make_requests(model, 64, "r")
    assert len(requests) == 64 and len({request.snapshot_id for request in requests}) == 4
    assert len({tuple(request.prompt_ids) for request in requests}) > 28, "more than seven powers of four positions"


def test_a_rate_is_not_helped_by_prompts_that_an_earlier_one_left_in_the_cache(model: Path):
    class Recording(UniformEngine):
        async def generate(self, request: Any) -> Any:
            firsts.append(request.prompt_ids[0])
            return await super().generate(request)

    firsts: list[int] = []
    engine, requests = Recording(), make_requests(model, 48, "r")
    for in_flight in (1, 8):
        assert asyncio.run(rate(engine, requests, f"{in_flight}", in_flight)) > 0
    assert len(firsts) == 12 + 40 and not set(firsts[:12]) & set(firsts[12:])


def test_wrong_probabilities_and_uncertain_forced_tokens_fail(sampled: Any, job: Job, reference: Any):
    unsure = [(one, replace(found, logprobs=found.logprobs - 1)) for one, found in sampled]
    with pytest.raises(StageFailed, match="forced tokens have a probability other than 1"):
        check_sampled(job, reference, unsure)
    right = [(one, replace(found, logprobs=reference_logprobs(reference, one, found))) for one, found in sampled]
    assert check_sampled(job, reference, right).largest == 0
    wrong = [(one, replace(found, logprobs=found.logprobs * 1.1)) for one, found in right]
    with pytest.raises(TrainingError, match="trainer and engine disagree"):
        check_sampled(job, reference, wrong)


def test_a_budget_that_a_run_would_halve_is_named_and_smaller_ones_are_measured(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_stages, "BUDGETS", {"cpu": (512, 1024)})
    monkeypatch.setattr(trainer_stages, "CASES", {"cpu": Case(positions=8, forks=4, own=100)})
    forward = Policy.masked_logprobs

    def small(policy: Policy, micro: MicroBatch, *reference: Any) -> Any:
        if micro.tokens > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(policy, micro, *reference)

    monkeypatch.setattr(trainer_stages, "compare_with_padded", lambda *_: None)
    monkeypatch.setattr(Policy, "masked_logprobs", small)
    figures, misfit = try_budgets(job, recompute=False)
    assert figures["tokens_per_s.512"] > 0 and "tokens_per_s.1024" not in figures
    assert misfit == "a budget of 1024 tokens does not fit without recomputation"


class _HalfGradientOfKeys(RangeAttention):
    def __call__(self, query: Any, key: Any, *rest: Any) -> Any:
        return super().__call__(query, (key + key.detach()) / 2, *rest)


@pytest.mark.parametrize(("kind", "agrees"), [(RangeAttention, 1.0), (_HalfGradientOfKeys, 0.0)], ids=["equal", "wrong"])
def test_a_wrong_gradient_of_flex_attention_is_seen(job: Job, monkeypatch: pytest.MonkeyPatch, kind: type, agrees: float):
    """Ranges in its place, because flex_attention itself has no gradient here."""
    monkeypatch.setattr(trainer_stages, "CASES", {"cpu": Case(positions=2, forks=3, own=30)})
    monkeypatch.setattr(masked_logprobs, "FlexAttention", kind)
    passed = compare_attentions(job, recompute=False)
    assert passed.figures["agrees"] == agrees and passed.figures["flex_s"] > 0 < passed.figures["ranges_s"]
    assert ("DIFFERS" in passed.sentence) == (not agrees)


def test_on_a_cpu_there_is_nothing_to_compare(job: Job):
    assert attention(job).figures == {}
