"""The torch engine computes what is shared once and what is certain together, keeps its loop free, and survives what fails."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from entente.decoding.legal_table import END, LegalTable, ThoughtRule
from entente.decoding.weight_files import WEIGHTS
from entente.inference import torch_batcher, torch_model
from entente.inference.settings import InferenceSettings
from entente.inference.torch_engine import TorchEngine
from entente.inference.torch_model import TorchModel
from entente.records.policy_version import version_in
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import EngineError, EngineLostError, InputError
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from tests import families
from tests.families import ladder

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


TABLE = ladder(steps=5, width=6)


def request(name: str, prompt: Sequence[int], *, table: LegalTable = TABLE, seed: int = 1) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=prompt, table=table, seed=seed)


def some_prompts(count: int, length: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(0, 200, length).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose odds are far from uniform, so that a wrong mask or position shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def test_no_attention_is_built_for_each_shape_on_a_card(folder: Path):
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch_model.TorchModel(folder, "float32", CPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def use(host: Any, folder: Path, work: Any, **settings: Any) -> Any:
    """What `work(engine)` comes to, on an engine that is started before and closed after."""

    chosen: dict[str, Any] = {"max_model_length": 256, **settings}

    async def life() -> Any:
        engine = TorchEngine(folder, InferenceSettings(**chosen), device=CPU)
        await engine.start()
        try:
            return await work(engine)
        finally:
            await engine.close()

    return host.submit(life()).result(timeout=60)


async def sample(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(each) for each in requests))


def gaps(folder: Path, requests: Sequence[GenerationRequest], found: Sequence[Generation]) -> list[float]:
    """Largest difference of each completion's log-probabilities from those of a plain forward of transformers."""
    return families.gaps(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), requests, found)


def thoughtful(table: LegalTable, budget: int, end: int) -> LegalTable:
    """`table` after a thought of ids below `end`, ended by 150."""
    return LegalTable(
        offsets=np.append(0, table.offsets + 1).astype(np.int32),
        token_ids=np.append(150, table.token_ids).astype(np.int32),
        next_nodes=np.append(1, np.where(table.next_nodes == END, END, table.next_nodes + 1)).astype(np.int32),
        longest=budget + 1 + table.longest,
        thought=ThoughtRule(budget=budget, end=end, excluded=(60, 199)),
    )


def test_thoughts_are_drawn_in_parts_of_the_head_and_of_the_batch(host, folder, monkeypatch):
    """Beside requests that do not think, which read only the rows of the head that they need."""
    monkeypatch.setattr(torch_model, "_HEAD_PART", 64)
    monkeypatch.setattr(torch_batcher, "_OPEN_LOGITS", 500)
    rows: list[int] = []
    plain = torch_model.TorchModel.open_logits
    monkeypatch.setattr(
        torch_model.TorchModel,
        "open_logits",
        lambda self, states, *rule: (rows.append(len(states)), plain(self, states, *rule))[1],
    )
    requests = [
        request(str(number), prompt, seed=number, table=thoughtful(TABLE, 7, 200) if number % 3 else TABLE)
        for number, prompt in enumerate(some_prompts(15))
    ]
    found = use(host, folder, lambda engine: sample(engine, requests))
    assert max(gaps(folder, requests, found)) < 1e-4
    assert sum(rows) == sum(
        int((each.table.legal_sets(sampled.token_ids)[0] < 0).sum()) for each, sampled in zip(requests, found, strict=True)
    )
    assert set(rows) <= {1, 2} and not any({60, 199} & {*sampled.token_ids[:-1].tolist()} for sampled in found)


def test_sixteen_bit_weights_draw_about_the_same_odds(host, folder):
    requests = [request(str(n), prompt) for n, prompt in enumerate(some_prompts(6))]
    found = use(host, folder, lambda engine: sample(engine, requests), dtype="bfloat16")
    assert 1e-5 < np.mean(gaps(folder, requests, found)) < 0.5


def test_each_token_that_prompts_share_is_computed_once_for_all(host, folder):
    """Eight positions of one rule text, eight forks each: 64 requests, and the tokens of one rule text and eight positions."""
    rules, *tails = some_prompts(9, 40)
    requests = [request(f"{n}/{fork}", [*rules, n, *tail[1:]], seed=fork) for n, tail in enumerate(tails) for fork in range(8)]

    async def work(engine: TorchEngine) -> Any:
        await sample(engine, requests)
        first = await engine.stats()
        await sample(engine, requests)
        return first, await engine.stats()

    first, second = use(host, folder, work)
    assert first.prompt_tokens - first.cached_tokens == 40 + 8 * 40
    assert second.prompt_tokens - second.cached_tokens - (first.prompt_tokens - first.cached_tokens) == 8


def test_tokens_that_must_follow_cost_no_passes_of_their_own(host, folder):
    table = ladder(steps=4, width=3, forced=9)
    requests = [request(str(n), prompt, table=table) for n, prompt in enumerate(some_prompts(5))]

    async def work(engine: TorchEngine) -> Any:
        return await sample(engine, requests), await engine.stats()

    found, stats = use(host, folder, work)
    assert max(gaps(folder, requests, found)) < 1e-4
    assert {len(generation.token_ids) for generation in found} == {41} and stats.engine_steps == 4
    assert stats.forced_tokens == 5 * 37


def test_the_loop_turns_between_steps_and_latecomers_join_what_is_under_way(host, folder):
    table = ladder(steps=15, width=2, forced=0)

    async def work(engine: TorchEngine) -> Any:
        early = [asyncio.ensure_future(engine.generate(request(f"e{n}", p, table=table))) for n, p in enumerate(some_prompts(4))]
        turns = 0
        while (await engine.stats()).engine_steps < 4:
            turns += 1
            await asyncio.sleep(0)
        late = asyncio.ensure_future(engine.generate(request("late", [5] * 20)))
        await late
        ahead = [task.done() for task in early]
        await asyncio.gather(*early)
        return turns, ahead

    turns, ahead = use(host, folder, work)
    assert turns >= 4 and not any(ahead), "a request of 5 choices came after four that had 11 left"


def test_prompts_that_share_among_themselves_are_filled_beside_rows_that_run(host, folder):
    """The second wave's rows begin behind those that run: what its prompts take from one another must come from there."""
    first, *others = some_prompts(8, 40)
    early = [request(f"e{n}", prompt, table=ladder(9, 3, 0)) for n, prompt in enumerate([first, first[:30], others[0]])]
    late = [request(f"l{n}{m}", others[1] + others[n] + others[m]) for n in (2, 3) for m in (4, 5, 6)]

    async def work(engine: TorchEngine) -> list[Generation]:
        running = [asyncio.ensure_future(engine.generate(each)) for each in early]
        while (await engine.stats()).engine_steps < 3:
            await asyncio.sleep(0)
        return [*await sample(engine, late), *await asyncio.gather(*running)]

    assert max(gaps(folder, [*late, *early], use(host, folder, work))) < 1e-4


def test_once_prefixes_are_forgotten_nothing_depends_on_which_versions_were_drawn_before(host, model, write_adapter, tmp_path):
    """Versions take turns, and whose turn it is decides which requests share a pass: a resumed run must begin with the same."""
    adapter = write_adapter(tmp_path / "a", seed=1, scale=0.1)

    async def work(engine: TorchEngine, sampled_before: int) -> Any:
        await engine.publish(version_in(adapter, 1))
        for number in range(sampled_before):
            await engine.generate(replace(request("before", [7] * 30), version=number))
        await engine.forget_prefixes()
        ended: list[str] = []

        async def one(asked: GenerationRequest) -> bytes:
            logprobs = (await engine.generate(asked)).logprobs.tobytes()
            ended.append(asked.request_id)
            return logprobs

        asked = [replace(request(f"{n}", [7] * 30 + [n]), version=n % 2) for n in range(9)]
        return await asyncio.gather(*map(one, asked)), ended

    fresh, after_one, after_both = (
        use(host, model, lambda engine, sampled=sampled: work(engine, sampled), max_sequences=4) for sampled in range(3)
    )
    assert fresh == after_one == after_both


def test_a_step_that_fails_ends_its_requests_as_lost_and_the_engine_works_on(host, folder, monkeypatch):
    requests = [request(str(n), prompt) for n, prompt in enumerate(some_prompts(3))]

    async def work(engine: TorchEngine) -> Any:
        before = await sample(engine, requests)
        with monkeypatch.context() as broken:
            broken.setattr(engine._model, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("a broken kernel")))
            lost = await asyncio.gather(*(engine.generate(each) for each in requests), return_exceptions=True)
        return before, lost, await sample(engine, requests), await engine.stats()

    before, lost, after, stats = use(host, folder, work)
    assert all(isinstance(error, EngineLostError) and "a broken kernel" in str(error) for error in lost)
    assert [one.token_ids.tolist() for one in before] == [other.token_ids.tolist() for other in after]
    assert stats.running == 0


def test_an_adapter_whose_numbers_overflow_is_a_refused_request_and_the_base_plays_on(
    host, model, write_adapter, tmp_path, positions
):
    adapter = write_adapter(tmp_path / "huge", seed=1, scale=1e18)

    async def work(engine: TorchEngine) -> Any:
        await engine.publish(version_in(adapter, 1))
        huge, base = await asyncio.gather(
            engine.generate(request("huge", [7] * 30)),
            engine.generate(replace(request("base", [7] * 30), version=0)),
            return_exceptions=True,
        )
        assert type(huge) is EngineError and "not finite" in str(huge)
        return base

    assert use(host, model, work).policy.version == 0


def test_retiring_frees_the_adapter_and_one_that_two_versions_share_stays(host, model, write_adapter, tmp_path):
    shared, own = (write_adapter(tmp_path / f"a{seed}", seed=seed, scale=0.1) for seed in (1, 2))

    async def work(engine: TorchEngine) -> Any:
        for version, adapter in ((1, shared), (2, own), (3, shared)):
            await engine.publish(version_in(adapter, version))
        held = []
        for oldest in (1, 2, 3):
            await engine.retire(oldest)
            assert engine._model is not None
            held.append({name for linear in engine._model._linear.values() for name in linear.parts})
        return held

    one, two = version_in(shared, 1).adapter_hash, version_in(own, 1).adapter_hash
    assert use(host, model, work) == [{one, two}, {one, two}, {one}]


@pytest.mark.parametrize("prompt", [[], [200], [-1]], ids=["empty", "one too high", "negative"])
def test_ids_outside_the_vocabulary_are_refused_before_they_reach_the_model(host, folder, prompt: list[int]):
    async def work(engine: TorchEngine) -> None:
        with pytest.raises(EngineError, match="vocabulary of 200") as refusal:
            await engine.generate(request("odd", prompt))
        assert not isinstance(refusal.value, EngineLostError)
        assert (await engine.stats()).requests == 0

    use(host, folder, work)


def test_a_model_that_lacks_a_weight_is_refused_because_transformers_makes_up_a_random_one(tmp_path: Path):
    lacking = families.save_family("qwen3", tmp_path / "model")
    weights = load_file(lacking / WEIGHTS)
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, lacking / WEIGHTS, metadata={"format": "pt"})
    for load in (lambda: TorchModel(lacking, "float32", CPU), lambda: Policy(lacking, TrainingSettings(device="cpu"))):
        with pytest.raises(InputError, match=r"lacks 1 of its weights, such as 'model.layers.0.mlp.up_proj.weight'"):
            load()


def test_a_model_that_cannot_be_loaded_is_one_sentence(host, folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(EngineError, match="torch could not load") as error:
        host.submit(TorchEngine(tmp_path, InferenceSettings()).start()).result(timeout=30)
    assert "\n" not in str(error.value)
