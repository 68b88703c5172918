"""vLLM in this process draws from exactly the masked policy, whatever else is in its batch, and survives what goes wrong."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from game.board import Board
from game.snapshot import Snapshot
from inference.embedded import EmbeddedEngine
from inference.host import EngineHost
from records.generation import Generation, GenerationRequest
from rollouts.fork import Tokens
from telemetry.errors import EngineError, EngineLostError

pytestmark = [pytest.mark.vllm, pytest.mark.system]


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


def test_a_failed_step_fails_its_requests_and_all_others_until_the_engine_is_started_again(
    host, vllm_engine, positions, tokens, monkeypatch
):
    monkeypatch.setattr(vllm_engine._engine, "step", lambda: (_ for _ in ()).throw(RuntimeError("a broken kernel")))
    for label in ("broken", "later"):
        with pytest.raises(EngineLostError, match="a broken kernel"):
            draw(host, vllm_engine, requests_for(positions[:1], tokens, label=label))
    host.submit(vllm_engine.start()).result(timeout=120)
    assert len(draw(host, vllm_engine, requests_for(positions[:1], tokens, label="mended"))) == 7
