"""Prompts are filled from rows that hold what they take over by then, and no token that others share is computed twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entente.inference.torch_batcher import LEAST_SHARED, plan_prefixes

ENOUGH = 1 << 30


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """A prompt of stretches (token, how often)."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts])


def carry_out(prompts: list[np.ndarray], standing: list[np.ndarray], budget: int = ENOUGH) -> tuple[list[list[int]], int, int]:
    """Follow the plan on plain lists: what each new row holds at the end, tokens computed, stages."""
    plan = plan_prefixes(prompts, standing, budget)
    rows: list[list[int]] = [[] for _ in plan.fills]
    computed = 0
    assert [fill.stage for fill in plan.fills] == sorted(fill.stage for fill in plan.fills)
    for stage in range(1 + max(fill.stage for fill in plan.fills)):
        now = [place for place, fill in enumerate(plan.fills) if fill.stage == stage]
        assert now, "a stage without work"
        copies = {}
        for place in now:
            fill = plan.fills[place]
            source = (standing[fill.source].tolist() if stage == 0 else rows[fill.source]) if fill.start else []
            copies[place] = list(source[: fill.start])
            assert len(copies[place]) == fill.start, "taken over before it was there"
        for place in now:
            fresh = prompts[plan.fills[place].request][plan.fills[place].start :]
            assert len(fresh) >= 1
            computed += len(fresh)
            rows[place] = copies[place] + fresh.tolist()
    return [rows[fill] for fill in plan.fill_of], computed, 1 + max(fill.stage for fill in plan.fills)


RULES, BOARDS, POWERS = (1, 40), [(10, 60), (11, 70)], [(20, 30), (21, 20), (22, 25)]


def test_rules_boards_and_powers_are_each_computed_once_in_three_stages():
    prompts = [ids(RULES, board, power) for board in BOARDS for power in POWERS]
    held, computed, stages = carry_out(prompts, [])
    assert held == [prompt.tolist() for prompt in prompts]
    assert computed == 40 + (60 + 70) + 2 * (30 + 20 + 25)
    assert stages == 3


def test_a_standing_row_spares_all_but_what_is_new():
    standing = [ids((9, 10)), ids(RULES, BOARDS[0], POWERS[0])]
    _, computed, stages = carry_out([ids(RULES, BOARDS[0], POWERS[1])], standing)
    assert (computed, stages) == (20, 1)


def test_a_few_tokens_in_common_are_not_worth_a_stage():
    few = LEAST_SHARED - 1
    _, computed, stages = carry_out([ids((1, few), (2, 9)), ids((1, few), (3, 9))], [])
    assert (computed, stages) == (2 * (few + 9), 1)


@pytest.mark.parametrize("budget, taken", [(1, 1), (99, 1), (100, 2)])
def test_a_budget_of_new_tokens_is_kept_but_one_prompt_always_fits(budget: int, taken: int):
    plan = plan_prefixes([ids((1, 50)), ids((2, 50)), ids((3, 50))], [], budget)
    assert len(plan.fill_of) == taken


_stretches = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=4).map(lambda parts: ids(*parts))


@settings(max_examples=300)
@given(st.lists(_stretches, min_size=1, max_size=8), st.lists(_stretches, max_size=4), st.integers(1, 200))
def test_every_row_ends_with_its_prompt_whatever_stands_there(prompts, standing, budget: int):
    held, computed, _ = carry_out(prompts, standing, budget)
    assert held == [prompt.tolist() for prompt in prompts[: len(held)]]
    assert computed <= sum(map(len, prompts))
