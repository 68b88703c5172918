"""Prompts and answers are counted as they are written, and cost what the targets say, beside the prompt of old."""

import json
from pathlib import Path

import pytest

from benchmarks.prompt_tokens import TARGETS, bench_prompts, decisions, json_prompt
from game.prompts import rules_text
from telemetry.errors import InputError


def test_the_prompt_of_old_tells_the_rules_the_position_and_every_legal_order():
    case = decisions(1, 0)[0]
    text = json_prompt(case.board, case.legal)
    told = json.loads(text.removeprefix(rules_text()).removesuffix("ORDERS:\n"))
    assert {power: tuple(own) for power, own in told["units"].items()} == case.board.units()
    assert {power: tuple(own) for power, own in told["centers"].items()} == case.board.centres()
    assert tuple(tuple(own) for own in told["legal_orders"].values()) == case.legal.options


def test_tokens_keep_their_targets_with_a_general_tokenizer_and_with_the_tiny_one(model: Path):
    """Two games; the same decisions for every way of writing them."""
    pytest.importorskip("mistral_common", reason="comes with vLLM")
    outcome = bench_prompts(games=2, tiny=model)
    assert outcome.ok and set(outcome.targets) == set(TARGETS)
    figures = outcome.metrics
    for prefix in ("", "tiny_"):
        costs = [figures[f"{prefix}{way}_prompt_tokens"] for way in ("none", "factored", "lines", "json")]
        assert costs == sorted(costs)
        assert figures[f"{prefix}prompt_tokens_ratio"] == pytest.approx(costs[3] / costs[1])
        assert figures[f"{prefix}completion_tokens_ratio"] >= 1.5
        # Numbers cost the prompt something: prompts are read once and shared, answers are drawn token by token.
        assert figures[f"{prefix}slot_prompt_tokens"] > figures[f"{prefix}none_prompt_tokens"]


def test_nothing_to_count_is_refused():
    with pytest.raises(InputError, match="no decision in 0 games"):
        bench_prompts(games=0)
