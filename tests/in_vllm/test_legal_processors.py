"""The logits processor leaves finite exactly what a legal order set may go on with.

The oracle: the legal sets of orders, each spelled out, and nothing but comparing beginnings. The engine around the processor is
made by hand, with vLLM's own batch updates.
"""

import itertools
import random
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from entente.decoding.codec import Codec
from entente.decoding.legal_table import END, LegalTable
from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import Thinking, thinking_of
from entente.game.legal import LegalOrders, OrderKind
from entente.inference import legal_arena
from entente.inference.legal_admission import SAMPLING_KEY, START_KEY, TABLE_KEY, admit, sampling_of
from entente.inference.legal_processor import LegalOrderProcessor

VOCABULARY = 700
"""Tokens of the engines here, more than the small model's."""
SEATS = 6
PLACES = ("PAR", "BUR", "GAS", "MAR", "SPA", "POR", "MAO", "BRE")


@st.composite
def legal_orders(draw: st.DrawFn) -> LegalOrders:
    """Random legal orders of every kind, few enough that all their sets can be spelled out."""
    kind = draw(st.sampled_from(list(OrderKind)))
    places = draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3, unique=True).map(sorted))
    if kind is OrderKind.MOVEMENT:
        orders = [[f"A {p} H", *(f"A {p} - {q}" for q in PLACES if q != p), f"A {p} S A BUR - PAR"] for p in places]
    elif kind is OrderKind.RETREAT:
        orders = [[f"A {p} D", *(f"A {p} R {q}" for q in PLACES if q != p)] for p in places]
    elif kind is OrderKind.BUILD:
        orders = [[f"A {p} B", f"F {p} B"] for p in places]
    else:
        orders = [[f"A {p} D"] for p in places]
    options = [draw(st.lists(st.sampled_from(own), min_size=1, max_size=5, unique=True).map(sorted)) for own in orders]
    every = kind in (OrderKind.MOVEMENT, OrderKind.RETREAT)
    picks = len(places) if every else draw(st.integers(1, len(places)))
    sites = tuple(places) if kind is OrderKind.BUILD else tuple(f"A {place}" for place in places)
    return LegalOrders(power="FRANCE", kind=kind, sites=sites, options=tuple(map(tuple, options)), picks=picks)


def spelled_sets(codec: Codec, legal: LegalOrders) -> list[tuple[int, ...]]:
    """Every legal set of orders as its tokens, by trying every combination of lines."""
    lines = {text for own in legal.options for text in own} | ({"WAIVE"} if legal.kind is OrderKind.BUILD else set())
    found = []
    for orders in itertools.product(sorted(lines), repeat=legal.picks):
        if legal.admits(orders):
            ids = [token for order in orders for token in (*codec.encode_order(order), codec.separator_id)]
            found.append((*ids[:-1], codec.eos_id))
    return found


class Request:
    """A request in flight, and what the oracle says of it."""

    def __init__(
        self,
        table: LegalTable | None,
        sets: Sequence[tuple[int, ...]],
        prompt: int,
        *,
        at_first_choice: bool = False,
        thinking: Thinking | None = None,
    ) -> None:
        """With `at_first_choice` the prompt ends with what every set begins with; with `thinking` a thought comes first."""
        self.thinking = thinking
        can_skip = table is not None and thinking is None and at_first_choice
        head, start = table.forced(0) if table is not None and can_skip else ([], 0)
        if start == END:
            head, start = [], 0
        extra = None if table is None else {TABLE_KEY: b64encode(table.to_bytes()).decode(), START_KEY: start}
        self.parameters = SamplingParams(max_tokens=200, extra_args=extra, detokenize=False)
        self.prompt = [7] * prompt + head
        self.output: list[int] = []
        self._sets = None if table is None else [ids[len(head) :] for ids in sets if ids[: len(head)] == tuple(head)]
        assert self._sets is None or len(self._sets) == len(sets), "a set begins otherwise"

    def may_follow(self) -> set[int] | None:
        """The tokens that go on spelling a legal set; None: any."""
        if self._sets is None:
            return None
        begun, sets = tuple(self.output), self._sets
        if self.thinking is not None:
            rule, marker = self.thinking.rule, self.thinking.marker
            if marker not in begun:
                return {marker} if len(begun) >= rule.budget else {*range(rule.end)}.difference(rule.excluded)
            begun = begun[begun.index(marker) + 1 :]
            sets = [(*self.thinking.closing, *ids) for ids in sets]
        length = len(begun)
        return {ids[length] for ids in sets if len(ids) > length and ids[:length] == begun} or None

    @property
    def thinks(self) -> bool:
        """Whether its next token is one of a thought."""
        return self.thinking is not None and self.thinking.marker not in self.output


class Runner:
    """The V1 runner's persistent batch: dense rows, holes filled by the newest or by the last, now and then two rows swapped."""

    def __init__(self) -> None:
        config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
            scheduler_config=SimpleNamespace(max_num_seqs=SEATS),
        )
        self.processor: Any = LegalOrderProcessor(config, torch.device("cpu"), False)
        self._rows: list[Request] = []

    def step(self, gone: list[Request], come: list[Request], rng: random.Random) -> Iterator[tuple[Request, int]]:
        rows: list[Request | None] = [None if row in gone else row for row in self._rows]
        removed = [index for index, row in enumerate(rows) if row is None]
        holes, added, moved = sorted(removed), [], []
        for request in come:
            index = holes.pop(0) if holes else len(rows)
            rows[index : index + 1] = [request]
            added.append((index, request.parameters, request.prompt, request.output))
            if index in removed:
                removed.remove(index)
        while rows and None in rows:
            last = rows.pop()
            if last is not None:
                hole = rows.index(None)
                rows[hole] = last
                moved.append((len(rows), hole, MoveDirectionality.UNIDIRECTIONAL))
        if len(rows) > 1 and rng.random() < 0.3:
            a, b = rng.sample(range(len(rows)), 2)
            rows[a], rows[b] = rows[b], rows[a]
            moved.append((a, b, MoveDirectionality.SWAP))
        update = BatchUpdate(batch_size=len(rows), removed=removed[::-1], added=added, moved=moved)
        self.processor.update_state(update if removed or added or moved else None)
        self._rows = [row for row in rows if row is not None]
        yield from ((request, row) for row, request in enumerate(self._rows))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return self.processor.apply(logits)


_BUILD = LegalOrders(
    power="FRANCE",
    kind=OrderKind.BUILD,
    sites=("BUR", "PAR"),
    options=(("A BUR B",), ("A PAR B", "F PAR B")),
    picks=1,
)
_TWO_ARMIES = LegalOrders(
    power="FRANCE",
    kind=OrderKind.MOVEMENT,
    sites=("A BUR", "A PAR"),
    options=(("A BUR H",), ("A PAR H",)),
    picks=2,
)
_ONE_ARMY = LegalOrders(power="FRANCE", kind=OrderKind.MOVEMENT, sites=("A PAR",), options=(("A PAR H",),), picks=1)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choices=st.lists(legal_orders(), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    room=st.sampled_from([1, 200, 1 << 14]),
)
@example(choices=[_BUILD, _TWO_ARMIES, _TWO_ARMIES, _ONE_ARMY], seed=0, room=1)  # a slot is reassigned while tables move
def test_finite_is_exactly_what_a_legal_set_may_go_on_with(codec: Codec, choices: list[LegalOrders], seed: int, room: int):
    """Requests come, go, are put aside with their tokens and come back; some carry no table; rows are repacked all the while,
    and so are the tables, where there is little room for them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(legal_arena, "LEAST_EDGES", room)
        follow_requests(Runner(), codec, choices, random.Random(seed))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choices=st.lists(legal_orders(), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    room=st.sampled_from([1, 1 << 14]),
    rules=st.lists(
        st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([640, VOCABULARY])), min_size=1, max_size=2, unique=True
    ),
)
def test_before_a_thought_ends_finite_is_everything_but_the_end_of_sequence(
    codec: Codec, choices: list[LegalOrders], seed: int, room: int, rules: list[tuple[int, int]]
):
    """Requests that think, of one rule or two, among others that do not."""
    thinking = thinking_of(codec, 1)
    assert thinking is not None and codec.vocabulary_size <= 640
    ways = [replace(thinking, rule=replace(thinking.rule, budget=budget, end=end)) for budget, end in rules]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(legal_arena, "LEAST_EDGES", room)
        follow_requests(Runner(), codec, choices, random.Random(seed), [None, *ways])


def follow_requests(
    engine: Any,
    codec: Codec,
    choices: list[LegalOrders],
    rng: random.Random,
    ways: Sequence[Thinking | None] = (None,),
) -> None:
    builders = {way: TableBuilder(codec, thinking=way) for way in ways}
    spelled = {legal: spelled_sets(codec, legal) for legal in choices}
    running: list[Request] = []
    aside: list[Request] = []
    finished = 0
    for step in itertools.count():
        gone = [request for request in running if request.output[-1:] == [codec.eos_id]]
        finished += len(gone)
        kept = [request for request in running if request not in gone]
        put_aside = [request for request in kept if rng.random() < 0.1]
        room = SEATS - len(kept) + len(put_aside)
        fresh = [aside.pop()] if aside and room and rng.random() < 0.6 else []
        room -= len(fresh)
        for _ in range(rng.randint(0, room) if step < 40 else 0):
            legal = rng.choice(choices)
            way = rng.choice(ways)
            table = builders[way].table(legal) if rng.random() < 0.8 else None
            way = None if table is None else way
            fresh.append(Request(table, spelled[legal], rng.randint(1, 9), at_first_choice=rng.random() < 0.5, thinking=way))
        running = [request for request in kept if request not in put_aside] + fresh
        aside += put_aside
        rows = list(engine.step(gone + put_aside, fresh, rng))
        assert len(rows) == len(running)
        if not running:
            if step > 40 and not aside:
                break
            continue
        logits = torch.randn(len(rows), VOCABULARY)
        before, masked = logits.clone(), engine.apply(logits)
        for request, row in rows:
            allowed = request.may_follow()
            keep = list(range(VOCABULARY)) if allowed is None else sorted(allowed)
            assert torch.isfinite(masked[row]).nonzero().flatten().tolist() == keep
            assert torch.equal(masked[row, keep], before[row, keep])
            if request.thinks and rng.random() < 0.3:
                allowed = {codec.separator_id}
            unbound = allowed is None and len(request.output) < 5
            request.output.append(rng.randrange(100, VOCABULARY) if unbound else rng.choice(sorted(allowed or [codec.eos_id])))
    assert finished and engine.processor.illegal_tokens == 0


def simple_table(*tokens: int) -> LegalTable:
    """One of `tokens`, then 9."""
    return LegalTable(
        offsets=np.array([0, len(tokens), len(tokens) + 1], np.int32),
        token_ids=np.array([*tokens, 9], np.int32),
        next_nodes=np.array([1] * len(tokens) + [-1], np.int32),
        longest=2,
    )


@pytest.mark.parametrize("token", [3, VOCABULARY, 2**31 - 1, -5], ids=str)
def test_a_token_outside_its_table_frees_its_row_alone_and_is_counted(token: int):
    """Nothing raises, whatever comes; not even a number that would be another node's token."""
    engine, rng = Runner(), random.Random(0)
    strayed, good = Request(simple_table(5, 6), [(5, 9), (6, 9)], 2), Request(simple_table(5, 8), [(5, 9), (8, 9)], 2)
    list(engine.step([], [strayed, good], rng))
    engine.apply(torch.zeros(2, VOCABULARY))
    strayed.output.append(token)
    good.output.append(8)
    rows = dict(engine.step([], [], rng))
    masked = engine.apply(torch.zeros(2, VOCABULARY))
    assert torch.isfinite(masked[rows[good]]).nonzero().flatten().tolist() == [9]
    if token >= 0:  # vLLM shows a token that it does not know yet as -1
        assert torch.isfinite(masked[rows[strayed]]).all()
        assert engine.processor.illegal_tokens == 1


def test_the_processor_waits_for_a_token_that_is_not_known_yet():
    """On CUDA a step may begin before the tokens of the last one have arrived; they stand as -1 until they do."""
    engine, rng, request = Runner(), random.Random(0), Request(simple_table(5, 6), [(5, 9), (6, 9)], 2)
    for output, allowed in ([], [5, 6]), ([-1], [5, 6]), ([6], [9]), ([6, -1], [9]):
        request.output[:] = output
        list(engine.step([], [request] if not output else [], rng))
        assert torch.isfinite(engine.apply(torch.zeros(1, VOCABULARY))[0]).nonzero().flatten().tolist() == allowed
    assert engine.processor.illegal_tokens == 0


def test_the_room_of_tables_that_nobody_uses_is_taken_back():
    """However many tables come by, the arena holds a few times those of the requests in flight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(legal_arena, "LEAST_EDGES", 8)
        engine, rng, before = Runner(), random.Random(0), []
        arena = engine.processor._rows._arena
        for number in range(60):
            now = [Request(simple_table(*range(10 * number, 10 * number + 9)), [(10 * number, 9)], 2) for _ in range(2)]
            list(engine.step(before, now, rng))
            engine.apply(torch.zeros(2, VOCABULARY))
            before = now
            assert len(arena._keys) < 10 * 4 * SEATS and len(arena._placed) < 4 * SEATS


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (b64encode(b"\0" * 64).decode(), "not a table"),
        ([1, 2, 3], "must be base64 text, not list"),
        (b64encode(simple_table(5, VOCABULARY).to_bytes()).decode(), "outside the vocabulary"),
    ],
    ids=["zeros", "list", "outside"],
)
def test_a_malformed_table_is_refused_at_admission_and_harms_nothing_behind_it(table, sentence: str):
    engine = Runner()
    request = Request(None, [], 2)
    request.parameters = SamplingParams(max_tokens=9, extra_args={TABLE_KEY: table})
    with pytest.raises(ValueError, match=sentence):
        LegalOrderProcessor.validate_params(request.parameters)
    list(engine.step([], [request], random.Random(0)))
    assert torch.isfinite(engine.apply(torch.zeros(1, VOCABULARY))).all()


def test_a_request_begins_at_the_start_of_its_table_or_at_its_first_choice():
    """4, then 5 or 6, then 9: with the 4 in the prompt two tokens are left."""
    table = LegalTable(
        offsets=np.array([0, 1, 3, 4], np.int32),
        token_ids=np.array([4, 5, 6, 9], np.int32),
        next_nodes=np.array([1, 2, 2, END], np.int32),
        longest=3,
    )
    table = b64encode(table.to_bytes()).decode()
    for start, tokens in (0, 3), (1, 2):
        LegalOrderProcessor.validate_params(SamplingParams(max_tokens=tokens, extra_args={TABLE_KEY: table, START_KEY: start}))
        with pytest.raises(ValueError, match=f"would cut a completion of {tokens} tokens"):
            LegalOrderProcessor.validate_params(
                SamplingParams(max_tokens=tokens - 1, extra_args={TABLE_KEY: table, START_KEY: start})
            )
    for start in (2, END, 7, None, "1"):
        with pytest.raises(ValueError, match="must be 0 or 1, where the table's first choice is"):
            LegalOrderProcessor.validate_params(SamplingParams(max_tokens=9, extra_args={TABLE_KEY: table, START_KEY: start}))


def table_text() -> str:
    return b64encode(simple_table(5, 6).to_bytes()).decode()


@pytest.mark.parametrize("sampling", [(5, 1.0), [5, 0.5]])
def test_a_seed_and_a_temperature_are_admitted_beside_temperature_0_for_vllm(sampling):
    parameters = SamplingParams(temperature=0.0, extra_args={TABLE_KEY: table_text(), SAMPLING_KEY: sampling})
    admit(parameters, None)
    assert sampling_of(parameters) == tuple(sampling)
    parameters.temperature = 0.7
    with pytest.raises(ValueError, match="beside vLLM's temperature 0"):
        admit(parameters, None)


@pytest.mark.parametrize("sampling", [(5, 0.0), (5, float("nan")), (5,), "5", (-1, 1.0), (2**63, 1.0), (5, "1")])
def test_what_is_no_seed_and_temperature_is_refused_and_samples_nothing(sampling):
    parameters = SamplingParams(temperature=0.0, extra_args={TABLE_KEY: table_text(), SAMPLING_KEY: sampling})
    with pytest.raises(ValueError, match="must be a seed of 63 bits and a temperature above 0"):
        admit(parameters, None)
    assert sampling_of(parameters) is None


def test_a_table_of_another_release_is_refused_with_both_formats():
    other = b64encode(np.array([3, 1, 1, 1, 0, 1, 5, END], "<i4").tobytes()).decode()
    with pytest.raises(ValueError, match="format 3, and this release of entente reads 1 and 2"):
        LegalOrderProcessor.validate_params(SamplingParams(max_tokens=9, extra_args={TABLE_KEY: other}))
