"""vLLM in this process draws from exactly the masked policy, whatever else is in its batch, and survives what goes wrong."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from game.board import Board
from game.snapshot import Snapshot
from inference.adapter_check import version_in
from inference.embedded import EmbeddedEngine
from inference.host import EngineHost
from records.generation import Generation, GenerationRequest
from rollouts.fork import Tokens
from telemetry.errors import EngineError, EngineLostError

pytestmark = pytest.mark.vllm


def requests_for(
    positions: Sequence[Snapshot], tokens: Tokens, *, label: str = "r", temperature: float = 1.0
) -> list[GenerationRequest]:
    """One request for every power of every position."""
    found = []
    for snapshot in positions:
        board = Board.restore(snapshot)
        for legal in board.legal_orders().values():
            prompt = tokens.prompt_ids(board, legal)
            found.append(
                GenerationRequest(
                    request_id=f"{label}/{len(found)}",
                    prompt_ids=prompt,
                    table=tokens.tables.table(legal),
                    seed=1000 + len(found),
                    temperature=temperature,
                )
            )
    return found


def draw(host: EngineHost, engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return host.submit(all_at_once()).result(timeout=120)


def test_the_torch_engine_draws_the_same_completions(host, vllm_engine, contract_torch, positions, tokens):
    requests = requests_for(positions, tokens, label="both engines")
    ours = draw(host, contract_torch.engine, requests)
    for one, other in zip(draw(host, vllm_engine, requests), ours, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-4


def test_vllm_makes_no_random_generator_for_a_request(host, vllm_engine, positions, tokens, monkeypatch):
    """On a GPU each would cost a launch in every step, over the whole vocabulary."""
    made: list[torch.Generator] = []

    class Counted(torch.Generator):
        def __init__(self, *given: Any, **named: Any) -> None:
            made.append(self)

    monkeypatch.setattr(torch, "Generator", Counted)
    draw(host, vllm_engine, requests_for(positions[:1], tokens, label="no generator"))
    assert not made


def test_a_model_whose_logits_are_no_numbers_draws_nothing_and_says_so(host, vllm_engine, positions, tokens, monkeypatch):
    from inference.legal_rows import LegalRows

    plain = LegalRows.apply
    monkeypatch.setattr(LegalRows, "apply", lambda rows, logits: plain(rows, logits.fill_(torch.nan)))
    request = requests_for(positions[:1], tokens, label="nan")[0]
    with pytest.raises(EngineError, match="logits for it are not finite"):
        draw(host, vllm_engine, [request])


def test_a_shared_prompt_is_found_in_the_prefix_cache(host, vllm_engine, positions, tokens):
    first, second = (
        requests_for(positions[:1], tokens, label="warm")[0],
        requests_for(positions[:1], tokens, label="again")[0],
    )
    draw(host, vllm_engine, [first])
    assert draw(host, vllm_engine, [second])[0].cost.cached_tokens >= 32 * (len(second.prompt_ids) // 32 - 1)
    host.submit(vllm_engine.forget_prefixes()).result(timeout=60)
    third = requests_for(positions[:1], tokens, label="forgotten")[0]
    assert draw(host, vllm_engine, [third])[0].cost.cached_tokens == 0


def test_more_prompts_at_once_than_one_pass_takes_are_drawn_too(host, vllm_engine, positions, tokens):
    requests = [request for label in "wxyz" for request in requests_for(positions, tokens, label=label)]
    fresh = [
        GenerationRequest(request_id=r.request_id, prompt_ids=[n % 600, *r.prompt_ids], table=r.table, seed=r.seed)
        for n, r in enumerate(requests)
    ]
    assert sum(len(request.prompt_ids) for request in fresh) > 3 * 4096
    assert len(draw(host, vllm_engine, fresh)) == len(fresh)


@pytest.mark.system
def test_a_failed_step_fails_its_requests_and_all_others_until_the_engine_is_started_again(
    host, vllm_engine, positions, tokens, monkeypatch
):
    monkeypatch.setattr(vllm_engine._engine, "step", lambda: (_ for _ in ()).throw(RuntimeError("a broken kernel")))
    for label in ("broken", "later"):
        with pytest.raises(EngineLostError, match="a broken kernel"):
            draw(host, vllm_engine, requests_for(positions[:1], tokens, label=label))
    host.submit(vllm_engine.start()).result(timeout=120)
    assert len(draw(host, vllm_engine, requests_for(positions[:1], tokens, label="mended"))) == 7


def test_a_version_published_while_requests_are_in_flight_waits_for_them(host, vllm_engine, positions, tokens, make_adapter):
    untrained = make_adapter(seed=2, scale=0.0)
    requests = requests_for([*positions, *positions], tokens, label="drain")

    async def publish_meanwhile() -> tuple[list[Generation], list[Generation]]:
        early = [asyncio.ensure_future(vllm_engine.generate(request)) for request in requests]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        publishing = asyncio.ensure_future(vllm_engine.publish(version_in(untrained, 1)))
        while vllm_engine._open.is_set():
            await asyncio.sleep(0.001)
        late = [
            asyncio.ensure_future(vllm_engine.generate(request)) for request in requests_for(positions[:1], tokens, label="late")
        ]
        answers = await asyncio.gather(*early), await asyncio.gather(*late)
        await publishing
        return answers

    early, late = host.submit(publish_meanwhile()).result(timeout=120)
    host.submit(vllm_engine.publish(version_in(untrained, 0))).result(timeout=60)
    assert {generation.policy.version for generation in early} == {0}
    assert {generation.policy.version for generation in late} == {1}
