"""Forks of a model that thinks before it orders: rows with open sets and exact log-probabilities, counted as they were drawn."""

import asyncio
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from entente.decoding.codec import Codec
from entente.decoding.legal_table import ThoughtRule
from entente.decoding.open_set import set_size
from entente.decoding.thinking import Thinking
from entente.game.board import POWERS, Board
from entente.game.prompts import PromptSettings, rules_text
from entente.players.opponents import POLICY
from entente.players.policy import DecisionRequest, PolicyPlayer, Tokens
from entente.records.rows import Generation, GenerationRequest
from entente.rollouts.figures import _thought_figures, rollout_figures
from entente.rollouts.fork import PlayedFork
from entente.rollouts.groups import decisions_of, phases_of, plan_start_groups, roll_out
from entente.rollouts.rehearse_forks import rehearse
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import InputError
from storage.arrow_files import check_tokens, to_table
from storage.runs import RunPaths
from storage.shards import coverage, publish_shard
from tests.instant_engine import UniformEngine
from tests.tasks.test_step_figures import NONE, figures_of

BUDGET = 4
SETTINGS = RolloutSettings(start_groups=2, forks_per_group=3, horizon_years=1, policy_powers="all")


@pytest.fixture(scope="module")
def thinker(model: Path) -> Tokens:
    return Tokens(Codec(model), PromptSettings(thinking_tokens=BUDGET))


class BriefEngine(UniformEngine):
    """Draws uniformly, and ends thoughts after 0 to BUDGET tokens."""

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        assert tokens.thinking is not None
        self.thinking = tokens.thinking

    async def generate(self, request: GenerationRequest) -> Generation:
        whole = await super().generate(request)
        thought, orders = self.thinking.split(whole.token_ids.tolist())
        ids = self.thinking.enclose(thought[: request.seed % (BUDGET + 1)], orders)
        legal, offsets = request.table.legal_sets(ids)
        sizes = [set_size(legal[first:after]) for first, after in pairwise(offsets.tolist())]
        return replace(whole, token_ids=np.array(ids, np.int32), logprobs=-np.log(np.array(sizes)).astype(np.float32))


@pytest.fixture(scope="module")
def played(thinker: Tokens, positions: Any) -> list[PlayedFork]:
    groups = plan_start_groups([(snapshot, POWERS[0]) for snapshot in positions[:2]], 0, SETTINGS)
    return asyncio.run(
        roll_out(groups, {POLICY: PolicyPlayer(BriefEngine(thinker), thinker)}, SETTINGS, producer="local", seed=1)
    )


def test_a_row_holds_an_open_set_for_each_drawn_token_of_the_thought_and_its_exact_logprob(
    played: list[PlayedFork], thinker: Tokens
):
    codec, thinking, seen = thinker.codec, thinker.thinking, set()
    assert thinking is not None and all(fork.status == "complete" for fork in played) and len(decisions_of(played)) > 40
    rules = rules_text(thinker.prompts)
    assert f"at most {BUDGET} tokens" in rules
    for row in decisions_of(played):
        ids, offsets = np.asarray(row.legal_ids), np.asarray(row.legal_offsets)
        prompt, completion = row.input_ids[: row.prompt_len], row.input_ids[row.prompt_len :]
        assert codec.decode(prompt).startswith(rules) and codec.decode(prompt).endswith("THOUGHT:\n")
        _, orders = codec.decode(completion).split("\nORDERS:\n")
        assert len(orders.split("\n")) == len(row.orders) and row.orders_rejected == 0
        sampled = int((ids < 0).sum())
        thought = completion[:sampled].tolist()
        seen.add(sampled if thought[-1] == thinking.marker else "forced")
        assert thinking.marker not in thought[:-1] and codec.eos_id not in thought
        for place in range(len(completion)):
            legal = ids[offsets[place] : offsets[place + 1]]
            if place < sampled:
                assert legal.tolist() == [-1 - codec.eos_id, codec.vocabulary_size]
                expected = -math.log(codec.vocabulary_size - 1)
            else:
                assert completion[place] in legal and (legal >= 0).all()
                expected = -math.log(len(legal))
            assert row.behaviour_logprobs[place] == pytest.approx(expected, abs=1e-5)
    assert seen == {1, 2, 3, 4, "forced"}, "thoughts of no token up to the whole budget, ended by the model or by force"


def test_published_rows_pass_the_checks_and_give_the_figures_of_thoughts(
    played: list[PlayedFork], thinker: Tokens, tmp_path: Path
):
    check_tokens(to_table(decisions_of(played)))
    publish_shard(RunPaths(tmp_path), "local", 0, decisions_of(played), phases_of(played), {}, next_start_group=2)
    found = coverage(RunPaths(tmp_path), "local", 0, 2)
    work = rollout_figures(found, 2, thinker.thinking)
    assert work["thoughts"] == len(decisions_of(played))
    assert work["thought_tokens"] == sum(int((np.asarray(row.legal_ids) < 0).sum()) for row in decisions_of(played))
    forced = [row for row in decisions_of(played) if row.seed % (BUDGET + 1) == BUDGET]
    assert work["forced_thoughts"] == len(forced) > 0
    figures = figures_of((rollout_figures(found, 2, thinker.thinking),), NONE)
    assert figures["rollout/thought_tokens_mean"] == work["thought_tokens"] / work["thoughts"]
    assert figures["rollout/thought_truncated_share"] == len(forced) / len(decisions_of(played))
    assert work["forced_tokens"] == sum(int((np.diff(row.legal_offsets) == 1).sum()) for row in decisions_of(played))
    assert not [name for name in figures_of((rollout_figures(found, 2),), NONE) if "thought" in name], "absent, not zero"


def test_the_probability_of_an_order_set_leaves_out_the_thought(thinker: Tokens):
    """Oracle: of orders that are drawn uniformly."""
    board = Board.start()
    legal = board.legal_orders()["FRANCE"]
    request = DecisionRequest(
        game="g", rng_name="g", phase_index=0, power="FRANCE", legal=legal, board=board, snapshot_id="start"
    )
    sampled = asyncio.run(PolicyPlayer(UniformEngine(), thinker).decide(request))
    sizes = [set_size(sampled.legal_ids[begin:end]) for begin, end in pairwise(sampled.legal_offsets.tolist())]
    assert sizes[0] == thinker.codec.vocabulary_size - 1
    assert sampled.probability == pytest.approx(1 / math.prod(sizes[BUDGET:]), rel=1e-4)


def test_a_rehearsal_counts_the_thought(thinker: Tokens, tokens: Tokens, positions: Any):
    thoughtful, plain = (rehearse(positions, each, SETTINGS, 1024, 0) for each in (thinker, tokens))
    assert thinker.thinking is not None
    more = BUDGET + 1 + len(thinker.thinking.closing)
    # The two draw other orders, of other lengths.
    assert more - 2 < thoughtful.completion_tokens - plain.completion_tokens < more + 2
    assert thoughtful.longest_request > plain.longest_request + BUDGET


def test_a_budget_that_leaves_no_room_for_a_prompt_is_refused_with_the_length_that_is_needed(model: Path):
    tokens = Tokens(Codec(model), PromptSettings(thinking_tokens=300))
    with pytest.raises(InputError, match=r"thinking_tokens 300 the first prompt .* need \d+ tokens, .*max_model_length 320"):
        tokens.check_thought(320)
    tokens.check_thought(1024)
    Tokens(Codec(model)).check_thought(1)  # a model that does not think has other checks


@pytest.mark.parametrize("excluded", [(9,), (8, 9), (7, 8, 9)], ids=["one end token", "two", "three"])
def test_thoughts_that_the_budget_ended_are_counted_with_any_number_of_end_tokens(excluded: tuple[int, ...]):
    rule = ThoughtRule(budget=3, end=20, excluded=excluded)
    thinking = Thinking(cue="", marker=5, closing=(6,), rule=rule)
    rows = [[*[rule.legal_set] * 3, [5], [6], [1, 2]], [*[rule.legal_set] * 2, [6], [1, 2]]]  # the second ended by itself
    table = pa.table(
        {
            "legal_ids": [np.concatenate(sets) for sets in rows],
            "legal_offsets": [np.cumsum([0, *map(len, sets)]) for sets in rows],
        }
    )
    assert _thought_figures(table, thinking) == {"thoughts": 2, "thought_tokens": 5, "forced_thoughts": 1}
