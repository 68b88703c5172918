"""For each family of models, engines and trainer agree with transformers on prompts beyond the sliding window.

The adapter is one that a real training step made, published to each engine as a run publishes it.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from entente.inference.adapter_check import check_adapter
from entente.inference.served_vllm import ServedVllm
from entente.inference.settings import InferenceSettings
from entente.inference.torch_engine import TorchEngine
from entente.records.policy_version import version_in
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import EngineError
from entente.training.micro_batches import plan
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from entente.training.update import Updater
from storage.gather import Batch
from tests.families import CONFIGS, gaps, requests_beyond_the_window, save_family

SETTINGS = TrainingSettings(lora_rank=8, lora_alpha=16, learning_rate=0.03, device="cpu")
BOUND = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny model of a family, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_family(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


def batch_of(requests: Sequence[GenerationRequest], found: Sequence[Generation]) -> Batch:
    """The rows of these decisions; the two completions of a prompt are one advantage group."""
    legal = [request.table.legal_sets(each.token_ids.tolist()) for request, each in zip(requests, found, strict=True)]
    rows = [[*request.prompt_ids, *each.token_ids.tolist()] for request, each in zip(requests, found, strict=True)]
    return Batch(
        decision_ids=np.arange(len(rows)),
        input_ids=np.concatenate(rows).astype(np.int32),
        input_offsets=np.cumsum([0, *map(len, rows)]),
        prompt_lens=np.array([len(request.prompt_ids) for request in requests], np.int32),
        behaviour_logprobs=np.concatenate([each.logprobs for each in found]),
        completion_offsets=np.cumsum([0, *(len(each.token_ids) for each in found)]),
        legal_ids=np.concatenate([ids for ids, _ in legal]).astype(np.int32),
        legal_offsets=np.cumsum([0, *np.concatenate([np.diff(offsets) for _, offsets in legal])]),
        temperatures=np.ones(len(rows), np.float32),
        returns=np.arange(len(rows), dtype=np.float64) % 2,
        advantage_groups=np.arange(len(rows), dtype=np.int32) // 2,
        policy_versions=np.zeros(len(rows), np.int32),
    )


def train_one_step(folder: Path, requests: Sequence[GenerationRequest], found: Sequence[Generation], target: Path) -> Path:
    """The adapter after one step on these decisions. Trainer and engine must agree on them first."""
    policy, batch = Policy(folder, SETTINGS), batch_of(requests, found)
    with torch.no_grad():
        for micro in plan(batch, range(len(requests)), 4096):
            np.testing.assert_allclose(policy.masked_logprobs(micro)["chosen"].numpy(), micro.behaviour, atol=BOUND)
    (update,) = Updater(policy, SETTINGS).updates(batch)
    assert not update.skipped
    policy.save_adapter(target)
    check_adapter(version_in(target, 1), folder, 8)
    return target


async def sample(engine: Any, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


def train_and_swap(host: Any, engine: Any, folder: Path, target: Path) -> None:
    """Draw, train one step on it, publish the adapter, draw again: every log-probability is that of transformers and peft."""
    before, after = requests_beyond_the_window("before"), requests_beyond_the_window("after")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    host.submit(engine.start()).result(timeout=300)
    try:
        found = host.submit(sample(engine, before)).result(timeout=120)
        assert max(gaps(base, before, found)) < BOUND
        spread = np.concatenate([each.logprobs for each in found])
        assert (spread < -0.3).sum() > 20 and np.std(spread[spread < 0]) > 0.3, "the logits are flat, so this test says nothing"
        if getattr(base.config, "sliding_window", None):
            unbounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, sliding_window=1000)
            assert max(gaps(unbounded, before, found)) > 0.01, "the window changes nothing, so this test says nothing"
        adapter = train_one_step(folder, before, found, target)
        host.submit(engine.publish(version_in(adapter, 1))).result(timeout=120)
        found = host.submit(sample(engine, after)).result(timeout=120)
        assert {each.policy.version for each in found} == {1}
        assert max(gaps(base, after, found)) > 0.05, "the step changed nothing, so this test says nothing"
        assert max(gaps(PeftModel.from_pretrained(base, str(adapter)), after, found)) < BOUND
    finally:
        host.submit(engine.close()).result(timeout=60)


@pytest.mark.in_turn
@pytest.mark.parametrize("family", CONFIGS)
def test_the_torch_engine_and_the_trainer_agree_with_transformers(host, folders, family: str, tmp_path: Path):
    engine = TorchEngine(folders(family), InferenceSettings(max_model_length=256, max_sequences=4), device=torch.device("cpu"))
    train_and_swap(host, engine, folders(family), tmp_path / "adapter")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"qwen3_moe"}))
def test_vllm_and_the_trainer_agree_with_transformers(host, folders, family: str, tmp_path: Path):
    engine = ServedVllm(folders(family), InferenceSettings(engine="vllm", max_model_length=256, max_sequences=8, threads=1))
    train_and_swap(host, engine, folders(family), tmp_path / "adapter")


def test_a_request_beyond_the_first_range_of_longrope_is_refused_and_leaves_the_others_as_they_are(tmp_path: Path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 32, "long_factor": [1.0 + place / 4 for place in range(32)]}
    folder = save_family("llama", tmp_path, rope_parameters=rope | factors)
    short, long = (requests_beyond_the_window("a")[number] for number in (0, 2))

    async def completions(*requests: GenerationRequest) -> list[Generation | BaseException]:
        engine = TorchEngine(folder, InferenceSettings(max_model_length=256), device=torch.device("cpu"))
        await engine.start()
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    (alone,), (beside, refused) = asyncio.run(completions(short)), asyncio.run(completions(short, long))
    assert isinstance(refused, EngineError) and "but the model reads 64" in str(refused)
    assert isinstance(alone, Generation) and isinstance(beside, Generation)
    assert alone.token_ids.tolist() == beside.token_ids.tolist() and alone.logprobs.tolist() == beside.logprobs.tolist()
