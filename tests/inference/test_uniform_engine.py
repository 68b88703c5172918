"""The engine without a model keeps to the contract, as far as one without a model can."""

import asyncio
from pathlib import Path

import numpy as np

from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import thinking_of
from entente.game.board import Board
from entente.inference.uniform_engine import UniformEngine
from entente.records.policy_version import PolicyVersion
from entente.records.rows import GenerationRequest


def test_it_draws_legal_answers_with_the_odds_that_it_says(tokens):
    engine = UniformEngine()
    for power, legal in Board.start().legal_orders().items():
        table = tokens.tables.table(legal)
        request = GenerationRequest(request_id=power, prompt_ids=[1], table=table, seed=7)
        sampled, again = (asyncio.run(engine.generate(request)) for _ in range(2))
        assert (
            legal.admits(tokens.tables.read(sampled.token_ids.tolist(), legal))
            and sampled.token_ids.tolist() == again.token_ids.tolist()
        )
        counts = np.diff(table.legal_sets(sampled.token_ids.tolist())[1])
        np.testing.assert_allclose(sampled.logprobs, -np.log(counts), rtol=1e-6)
    thinks = TableBuilder(tokens.codec, thinking=thinking_of(tokens.codec, 6)).table(legal)
    request = GenerationRequest(request_id="thinks", prompt_ids=[1], table=thinks, seed=7)
    thinks.legal_sets(asyncio.run(engine.generate(request)).token_ids.tolist())  # raises unless whole and legal
    policy = PolicyVersion(version=3, adapter_hash="hash", adapter=Path("x"))
    asyncio.run(engine.publish(policy))
    request = GenerationRequest(request_id="last", prompt_ids=[1], table=table, seed=7)
    assert asyncio.run(engine.generate(request)).policy == policy and asyncio.run(engine.stats()).requests == 16
