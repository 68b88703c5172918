"""Draws follow the masked policy at the temperature asked for, and depend on the seed alone, whose numbers are splitmix64."""

import math
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from entente.decoding.legal_table import END, LegalTable, ThoughtRule
from entente.inference import sampling
from entente.inference.sampling import seed_array, uniforms
from entente.inference.torch_batcher import PartialCompletion, sample_next
from entente.records.rows import GenerationRequest


def table(*nodes: dict[int, int]) -> LegalTable:
    """A table from its nodes, each {token: next node}."""
    offsets = np.cumsum([0, *map(len, nodes)]).astype(np.int32)
    ids = [token for node in nodes for token in sorted(node)]
    nexts = [node[token] for node in nodes for token in sorted(node)]
    depth = [0] * (len(nodes) + 1)
    for number in range(len(nodes) - 1, -1, -1):
        depth[number] = 1 + max(depth[target] for target in nodes[number].values())
    return LegalTable(offsets=offsets, token_ids=np.array(ids, np.int32), next_nodes=np.array(nexts, np.int32), longest=depth[0])


def begin(table: LegalTable, seed: int, temperature: float) -> PartialCompletion:
    """A request of this table, seed and temperature, before its first draw."""
    request = GenerationRequest(request_id="", prompt_ids=[1], table=table, seed=seed, temperature=temperature)
    return PartialCompletion(request, Future())  # type: ignore[arg-type]


ONE_CHOICE = table({3: END, 5: END, 8: END})


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_as_often_as_the_policy_says(temperature: float):
    logits = np.array([0.3, -1.0, 1.1], np.float32)
    exact = np.exp(logits.astype(np.float64) / temperature)
    exact /= exact.sum()
    partials = [begin(ONE_CHOICE, seed, temperature) for seed in range(20_000)]
    sample_next(partials, [partial.allowed() for partial in partials], np.tile(logits, len(partials)))
    for token, share in zip((3, 5, 8), exact, strict=True):
        seen = [partial for partial in partials if partial.token_ids == [token]]
        assert abs(len(seen) / len(partials) - share) < 4 * math.sqrt(share * (1 - share) / len(partials))
        assert seen[0].logprobs == [pytest.approx(math.log(share), abs=1e-9)]


def test_a_draw_is_that_of_the_seed_whatever_else_is_drawn_with_it():
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    together = [begin(ONE_CHOICE, seed, 1.0) for seed in range(100)]
    sample_next(together, [partial.allowed() for partial in together], logits)
    for seed, partial in enumerate(together):
        alone = begin(ONE_CHOICE, seed, 1.0)
        sample_next([alone], [alone.allowed()], logits[3 * seed : 3 * seed + 3])
        assert (alone.token_ids, alone.logprobs) == (partial.token_ids, pytest.approx(partial.logprobs, abs=1e-12))


@pytest.mark.parametrize("thrown", [0.0, 1 - 2**-53], ids=["lowest", "highest"])
def test_the_ends_of_the_dice_stay_within_their_own_legal_set(thrown: float, monkeypatch: pytest.MonkeyPatch):
    partials = [begin(ONE_CHOICE, 0, 1.0) for _ in range(50)]
    monkeypatch.setattr(sampling, "uniforms", lambda seeds, places: np.full(len(seeds), thrown))
    sample_next(
        partials, [partial.allowed() for partial in partials], np.random.default_rng(1).normal(size=150).astype(np.float32)
    )
    assert {tuple(partial.token_ids) for partial in partials} == {(3,) if thrown == 0 else (8,)}


def test_what_must_follow_is_taken_without_a_draw_and_counted():
    partial = begin(table({1: 1}, {2: 2}, {4: 3, 6: 4}, {7: END}, {8: 5}, {9: END}), 0, 1.0)
    assert partial.token_ids == [1, 2] and not partial.done
    sample_next([partial], [partial.allowed()], np.array([50.0, -50.0], np.float32))
    assert partial.token_ids == [1, 2, 4, 7] and partial.done and partial.forced == 3
    assert partial.logprobs == [0.0, 0.0, pytest.approx(0.0, abs=1e-12), 0.0]


def test_logits_far_apart_neither_overflow_nor_draw_the_impossible():
    partials = [begin(ONE_CHOICE, seed, 0.1) for seed in range(500)]
    sample_next(partials, [partial.allowed() for partial in partials], np.tile(np.array([-3e4, 3e4, -np.inf], np.float32), 500))
    assert {tuple(partial.token_ids) for partial in partials} == {(5,)}


@pytest.mark.parametrize("broken", [np.nan, np.inf], ids=["nan", "inf"])
def test_a_row_whose_logits_are_no_numbers_is_not_drawn_from_and_the_others_are(broken: float):
    partials = [begin(ONE_CHOICE, seed, 1.0) for seed in range(3)]
    alone = [begin(ONE_CHOICE, seed, 1.0) for seed in range(3)]
    good = np.array([0.5, -0.5, 1.0], np.float32)
    logits = np.concatenate((good, np.array([0.0, broken, 1.0], np.float32), good))
    assert sample_next(partials, [partial.allowed() for partial in partials], logits) == [1]
    sample_next(alone, [partial.allowed() for partial in alone], np.tile(good, 3))
    assert partials[1].token_ids == []
    assert [partials[place].token_ids for place in (0, 2)] == [alone[place].token_ids for place in (0, 2)]


def thought(budget: int, *excluded: int) -> LegalTable:
    """A thought below 6 that 3 ends; then 4; then the end of sequence, the first of `excluded`."""
    found = table({3: 1}, {4: 2}, {excluded[0]: END})
    return replace(found, longest=budget + 3, thought=ThoughtRule(budget=budget, end=6, excluded=excluded))


@pytest.mark.parametrize(
    ("excluded", "thrown"),
    [((2,), None), ((1, 2, 4), None), ((0, 1), 0.0), ((4, 5), 1 - 2**-53)],
    ids=["any", "any of few", "lowest", "highest"],
)
def test_a_thought_token_is_any_id_but_the_excluded_ones_as_often_as_the_policy_says(
    excluded: tuple[int, ...], thrown: float | None, monkeypatch: pytest.MonkeyPatch
):
    ids = [token for token in range(6) if token not in excluded]
    logits = np.array([0.3, -1.0, 1.1, 0.0, 0.7], np.float32)[: len(ids)]
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum()
    partials = [begin(thought(9, *excluded), seed, 1.0) for seed in range(8000)]
    if thrown is not None:
        monkeypatch.setattr(sampling, "uniforms", lambda seeds, places: np.full(len(seeds), thrown))
    sample_next(partials, [partial.allowed() for partial in partials], np.tile(logits, len(partials)))
    if thrown is not None:
        assert {partial.token_ids[0] for partial in partials} == {ids[0 if thrown == 0 else -1]}
        return
    for token, share in zip(ids, exact, strict=True):
        seen = [partial for partial in partials if partial.token_ids[0] == token]
        assert abs(len(seen) / len(partials) - share) < 4 * math.sqrt(share * (1 - share) / len(partials))
        assert seen[0].logprobs[0] == pytest.approx(math.log(share), abs=1e-9)
        assert seen[0].done == (token == 3), "the marker, and what must follow it, ends this completion"


def test_after_the_budget_the_marker_is_forced_and_costs_no_draw():
    partial = begin(thought(2, 5), 0, 1.0)
    for token in (1, 0):
        assert not partial.done and partial.allowed().tolist() == [-6, 6]
        partial.take(token, -0.5)
    assert partial.done and partial.token_ids == [1, 0, 3, 4, 5] and partial.forced == 3
    assert partial.logprobs == [-0.5, -0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("seed", "published"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]),
    ],
)
def test_the_numbers_of_a_seed_are_the_outputs_of_splitmix64(seed: int, published: list[int]):
    found = uniforms(seed_array([seed] * len(published)), np.arange(len(published)))
    assert found.tolist() == [(bits >> 11) / 2**53 for bits in published]
