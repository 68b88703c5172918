"""Forced tokens cost vLLM no pass of their own, and change nothing else: not what may be drawn, not how likely it was."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from decoding.legal_table import TableBuilder
from decoding.thinking import thinking_of
from game.board import Board
from inference.embedded import EmbeddedEngine
from inference.engine import EngineStats
from inference.host import EngineHost
from inference.settings import InferenceSettings
from records.generation import Generation, GenerationRequest
from smoke.engine_stages import reference_logprobs
from telemetry.errors import EngineError
from tests.inference.test_embedded import draw, requests_for

pytestmark = [pytest.mark.vllm, pytest.mark.system]

TIGHT = InferenceSettings(max_model_length=256, max_batched_tokens=256, max_sequences=64, adapters="merge_reload")
"""A pass has room for four tokens of each row, so a jump for three."""


def stats(host: EngineHost, engine: EmbeddedEngine) -> EngineStats:
    return host.submit(engine.stats()).result(timeout=60)


def choices(request: GenerationRequest, generation: Generation) -> int:
    """Tokens of the completion that had an alternative."""
    _, offsets = request.table.legal_sets(generation.token_ids.tolist())
    return int((np.diff(offsets) > 1).sum())


def test_a_request_takes_as_many_passes_as_it_has_choices(host, vllm_engine, positions, tokens):
    for request in requests_for(positions[:1], tokens, label="passes"):
        before = stats(host, vllm_engine)
        generation = draw(host, vllm_engine, [request])[0]
        after = stats(host, vllm_engine)
        assert len(generation.token_ids) > choices(request, generation) > 0
        assert after.engine_steps - before.engine_steps == choices(request, generation)
        assert after.completion_tokens - before.completion_tokens == len(generation.token_ids)
        assert after.drawn_tokens - before.drawn_tokens == choices(request, generation)
        assert after.forced_tokens - before.forced_tokens == len(generation.token_ids) - choices(request, generation)


def test_a_thought_takes_a_pass_for_each_drawn_token_and_none_for_what_must_follow_it(host, vllm_engine, positions, tokens):
    tables = TableBuilder(tokens.codec, thinking=thinking_of(tokens.codec, 5))
    legal = Board.restore(positions[0]).legal_orders()
    for plain, own in zip(requests_for(positions[:1], tokens, label="thoughts"), legal.values(), strict=True):
        request = replace(plain, table=tables.table(own))
        before = stats(host, vllm_engine)
        generation = draw(host, vllm_engine, [request])[0]
        after = stats(host, vllm_engine)
        assert (request.table.legal_sets(generation.token_ids.tolist())[0] < 0).any()
        assert after.engine_steps - before.engine_steps == choices(request, generation)
        assert after.drawn_tokens - before.drawn_tokens == choices(request, generation)


def test_drawn_one_by_one_the_completions_are_the_same(host, vllm_engine, positions, tokens):
    """A random number belongs to a place in the completion, however the engine gets there."""
    tables = TableBuilder(tokens.codec, thinking=thinking_of(tokens.codec, 5))
    orders = requests_for(positions[:3], tokens, label="jumped")
    legal = [own for snapshot in positions[:3] for own in Board.restore(snapshot).legal_orders().values()]
    asked = [
        replace(request, table=tables.table(own)) if number % 2 else request
        for number, (request, own) in enumerate(zip(orders, legal, strict=True))
    ]
    jumped = draw(host, vllm_engine, asked)
    host.submit(vllm_engine.jump_forced(False)).result(timeout=60)
    try:
        plain = draw(host, vllm_engine, asked)
    finally:
        host.submit(vllm_engine.jump_forced(True)).result(timeout=60)
    for one, other in zip(jumped, plain, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() < 1e-4


def test_where_a_pass_has_little_room_jumps_are_short_and_nothing_is_cut(host, model: Path, positions, tokens, reference):
    engine = EmbeddedEngine(model, TIGHT, name="tight")
    host.submit(engine.start()).result(timeout=300)
    try:
        requests = requests_for(positions, tokens, label="tight")
        assert len(requests) > TIGHT.max_sequences / 2
        generations = draw(host, engine, requests)
        for request, generation in zip(requests, generations, strict=True):
            assert np.abs(reference_logprobs(reference, request, generation) - generation.logprobs).max() < 1e-4
        short = draw(host, engine, [replace(requests[0], request_id="alone")])[0]
        assert short.token_ids.tolist() == generations[0].token_ids.tolist()
    finally:
        host.submit(engine.close()).result(timeout=60)


class Stubborn(EmbeddedEngine):
    """An engine whose vLLM cannot jump, and is never asked for more."""

    async def _start(self, *, slots: bool) -> None: ...

    async def _warm_up(self) -> None: ...

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ["its passes are planned ahead"]


def test_an_engine_that_cannot_jump_draws_one_by_one_and_says_so_unless_it_was_told_to(host, model: Path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("inference.vllm_engine.reporter", lambda: SimpleNamespace(say=said.append))
    asked = InferenceSettings(adapters="merge_reload")
    host.submit(Stubborn(model, asked, name="stubborn").start()).result(timeout=60)
    assert "one by one: engine 'stubborn' cannot jump over forced tokens: its passes are planned ahead" in said[0]
    told = Stubborn(model, asked.model_copy(update={"jump_forced": "on"}), name="stubborn")
    with pytest.raises(EngineError, match=r"planned ahead: set inference\.jump_forced to 'off'"):
        host.submit(told.start()).result(timeout=60)


class Runner:
    """What `ForcedJump` looks at before it takes a runner on."""

    use_async_scheduling, speculative_config = False, None
    parallel_config = SimpleNamespace(pipeline_parallel_size=1)
    input_batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=[]))

    def _bookkeeping_sync(self) -> tuple[int, int, int, int, int, int, int, int]: ...


def older(self: object) -> tuple[int, int, int, int, int, int, int]: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"use_async_scheduling": True}, "schedules asynchronously"),
        ({"speculative_config": "ngram"}, "speculates"),
        ({"input_batch": SimpleNamespace()}, "not the known one"),
        ({"_bookkeeping_sync": older}, "returns 7 results, not the known 8"),
        ({"_bookkeeping_sync": lambda self: None}, "returns an unknown number of results"),
    ],
)
def test_a_runner_that_works_otherwise_is_left_alone(differs: dict, sentence: str):
    from inference.forced_jump import ForcedJump

    worker = ForcedJump()
    worker.model_runner = type("Other", (Runner,), differs)()
    assert sentence in worker.jump_forced_tokens(True)
    assert "_bookkeeping_sync" not in vars(worker.model_runner)
