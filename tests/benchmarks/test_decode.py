"""Figures of the decode benchmark are of what they say: arms draw alike, and shares count tokens."""

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import decode
from benchmarks.decode_cases import RunInputs, record_step, requests_for
from entente.game.snapshot import Snapshot
from entente.inference.settings import InferenceSettings
from entente.inference.torch_engine import TorchEngine
from entente.inference.uniform_engine import UniformEngine
from entente.rollouts.settings import RolloutSettings

# -- cases -------------------------------------------------------------------------------------------------------------------


def laptop_like(positions: list[Snapshot], **changed: int) -> RunInputs:
    rollouts = RolloutSettings(start_groups=2, forks_per_group=3, horizon_years=1, **changed)
    return RunInputs(positions=positions, rollouts=rollouts, seed=0)


def test_a_recorded_step_has_every_decision_of_every_phase_index_with_its_board(tokens, positions):
    played = asyncio.run(record_step(laptop_like(positions), 1, UniformEngine(), tokens))  # type: ignore[arg-type]
    assert len(played.cases) == len(played.sampled) == played.decisions
    again = requests_for(played.cases, tokens, "x")
    by_case = [(tuple(request.prompt_ids), request.snapshot_id) for request, _ in played.sampled]
    assert [(tuple(request.prompt_ids), request.snapshot_id) for request in again] == by_case
    for case, (request, generation) in zip(played.cases, played.sampled, strict=True):
        assert request.table.to_bytes() == tokens.tables.table(case.legal).to_bytes()
        request.table.legal_sets(generation.token_ids.tolist())
    phases = Counter(request.request_id.split("/")[-2] for request, _ in played.sampled)
    assert phases["0"] == 6 and phases["1"] > 0


# -- figures -----------------------------------------------------------------------------------------------------------------


def test_shares_and_uncached_tokens_are_of_tokens_in_whole_rollouts(tokens, positions):
    """An engine that finds ten tokens of each prompt in its cache."""

    prompts: list[int] = []
    emptied: list[int] = []

    class Caching(UniformEngine):
        async def forget_prefixes(self) -> None:
            emptied.append(1)

        async def generate(self, request):
            prompts.append(len(request.prompt_ids))
            sampled = await super().generate(request)
            return replace(sampled, cached_tokens=10)

    found, cases = asyncio.run(decode.rollout_figures(Caching(), tokens, laptop_like(positions), rounds=1))
    whole, decisions = sum(prompts), len(prompts)
    assert len(emptied) == decode.STEPS and len(cases) < decisions
    assert found["prefix_hit_share"] == pytest.approx(10 * decisions / whole)
    assert found["uncached_tokens_per_decision"] == pytest.approx(whole / decisions - 10)


def test_no_arm_finds_prompts_of_another_in_a_cache_that_cannot_be_emptied(tokens, positions):
    arms: list[set[int]] = []

    class Recording(UniformEngine):
        async def forget_prefixes(self) -> None:
            arms.append(set())

        async def generate(self, request):
            arms[-1].add(request.prompt_ids[0])
            return await super().generate(request)

    async def measure() -> None:
        _, cases = await decode.rollout_figures(Recording(), tokens, laptop_like(positions), rounds=1)
        await decode.batching_figures(Recording(), requests_for(cases, tokens, "again"), rounds=2)

    asyncio.run(measure())
    assert len(arms) == decode.STEPS + 2 * len(decode.RATES_AT)
    assert sum(map(len, arms)) == len(set.union(*arms)) == len(arms)


def test_each_adapter_swap_samples_one_token(tokens, model: Path):
    async def swap() -> None:
        engine = TorchEngine(model, InferenceSettings(max_model_length=512))
        await engine.start()
        try:
            assert await decode.swap_ms(engine, tokens, model, rounds=2) > 0
            assert (await engine.stats()).sampled_tokens == 3, "one to warm up"
        finally:
            await engine.close()

    asyncio.run(swap())


@pytest.mark.slow
def test_the_whole_benchmark_ends_with_one_object(entente, model: Path):
    shutil.copytree(model, entente.folder / "model")
    done = entente.process("bench", "decode", "--model", "model", "--rounds", "1", "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["benchmark"] == "decode" and set(told["targets"]) <= set(told["metrics"])
