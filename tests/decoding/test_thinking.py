"""A completion may begin with a thought: a bounded number of ids from an open set, then its end marker; it is read from rows."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from entente.decoding.codec import Codec
from entente.decoding.legal_table import END, LegalTable, ThoughtRule
from entente.decoding.open_set import excluded_ids, nth_id, open_set, open_sets, set_size
from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import Thought, read_thought, thinking_of, thought_of
from entente.game.legal import LegalOrders, OrderKind
from entente.players.policy import Tokens
from entente.telemetry.errors import DataError, InputError
from storage.runs import RunPaths
from tests.chat_models import set_config

RETREAT = LegalOrders(
    power="ITALY", kind=OrderKind.RETREAT, sites=("A VEN",), options=(("A VEN D", "A VEN R ROM", "A VEN R TUS"),), picks=1
)
BUILD = LegalOrders(
    power="RUSSIA",
    kind=OrderKind.BUILD,
    sites=("MOS", "STP"),
    options=(("A MOS B",), ("A STP B", "F STP/NC B")),
    picks=2,
)


def small_thought(budget: int = 2, *, end: int = 6, excluded: tuple[int, ...] = (5,)) -> LegalTable:
    """A thought below `end`, ended by 3; then 4; then 1 or 2; then 5."""
    return LegalTable(
        offsets=np.array([0, 1, 2, 4, 5], np.int32),
        token_ids=np.array([3, 4, 1, 2, 5], np.int32),
        next_nodes=np.array([1, 2, 3, 3, END], np.int32),
        longest=budget + 4,
        thought=ThoughtRule(budget=budget, end=end, excluded=excluded),
    )


@pytest.mark.parametrize("excluded", [(5,), (0, 2, 5)], ids=["one end token", "several"])
@pytest.mark.parametrize("budget", [1, 2])
def test_exactly_the_thoughts_within_the_budget_may_come_before_the_orders(budget: int, excluded: tuple[int, ...]):
    table = LegalTable.from_bytes(small_thought(budget, excluded=excluded).to_bytes())
    answers = [[4, 1, 5], [4, 2, 5]]
    free = [token for token in (0, 1, 2, 4) if token not in excluded]  # neither the marker 3 nor an end token
    wanted = {
        (*thought, 3, *answer)
        for length in range(budget + 1)
        for thought in itertools.product(free, repeat=length)
        for answer in answers
    }
    found = set()
    for length in range(1, budget + 6):
        for completion in itertools.product(range(6), repeat=length) if length < 6 else ():
            try:
                table.legal_sets(completion)
            except DataError:
                continue
            found.add(completion)
    assert found == {completion for completion in wanted if len(completion) < 6}
    assert max(map(len, wanted)) == table.longest
    for completion in wanted:
        ids, offsets = table.legal_sets(completion)
        sampled = min(completion.index(3) + 1, budget)
        for place, token in enumerate(completion):
            legal = ids[offsets[place] : offsets[place + 1]].tolist()
            assert (legal == open_set(excluded, 6).tolist()) == (place < sampled)
            assert place < sampled or token in legal


@pytest.mark.parametrize("token", [5, 6, -1])
def test_a_thought_holds_neither_the_end_of_sequence_nor_a_foreign_id(token: int):
    with pytest.raises(DataError, match="not legal in a thought"):
        small_thought().advance(small_thought().start, token)


def test_bytes_round_trip_and_a_table_without_a_thought_has_the_bytes_that_it_always_had(tokens: Tokens):
    table = small_thought()
    again = LegalTable.from_bytes(table.to_bytes())
    assert (again.thought, again.longest, again.start) == (table.thought, table.longest, table.start)
    plain = tokens.tables.table(RETREAT)
    header = [1, len(plain.offsets) - 1, len(plain.token_ids), plain.longest]
    assert plain.to_bytes() == np.concatenate([header, plain.offsets, plain.token_ids, plain.next_nodes]).astype("<i4").tobytes()


MARKER_ENDS = replace(small_thought(), token_ids=np.array([5, 4, 1, 2, 5], np.int32))
TWO_MARKERS = replace(
    small_thought(),
    offsets=np.array([0, 2, 3, 5, 6], np.int32),
    token_ids=np.array([0, 3, 4, 1, 2, 5], np.int32),
    next_nodes=np.array([1, 1, 2, 3, 3, END], np.int32),
)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        pytest.param(small_thought(0), "must be at least 1", id="no budget"),
        pytest.param(small_thought(excluded=(4,)), "another one ends its completions", id="not the end"),
        pytest.param(small_thought(excluded=(5, 4)), "another one ends its completions", id="not in order"),
        pytest.param(small_thought(excluded=(4, 6)), "another one ends its completions", id="excluded beyond"),
        pytest.param(small_thought(excluded=()), "another one ends its completions", id="none excluded"),
        pytest.param(small_thought(excluded=(3, 5)), "without a single token that ends it", id="marker excluded"),
        pytest.param(replace(small_thought(), longest=4), "longest completion of 4 tokens, but has one of 6", id="length"),
        pytest.param(MARKER_ENDS, "without a single token that ends it", id="marker ends"),
        pytest.param(TWO_MARKERS, "without a single token that ends it", id="two markers"),
    ],
)
def test_a_received_thought_that_breaks_a_rule_is_refused(table: LegalTable, sentence: str):
    with pytest.raises(DataError, match=sentence):
        LegalTable.from_bytes(table.to_bytes())


def test_every_single_integer_changed_is_refused_or_still_a_sound_table():
    words = np.frombuffer(small_thought().to_bytes(), "<i4")
    for place in range(len(words)):
        for value in (-7, -1, 0, 1, 3, words[place] + 1, 2**31 - 1):
            altered = words.copy()
            altered[place] = value
            try:
                table = LegalTable.from_bytes(altered.tobytes())
            except DataError:
                continue
            if table.largest_id >= 6:  # outside the vocabulary: engines and server refuse it
                continue
            state, length, lowest = table.start, 0, True
            while state != END:  # the longest completion: never the marker before it must be, then the deepest branch
                legal = table.allowed(state)
                ids = [nth_id(legal, number) for number in range(set_size(legal))]
                assert all(0 <= token < 6 for token in ids)
                if state < END:
                    assert ids and table.thought is not None and not {*table.thought.excluded} & {*ids}
                    state = table.advance(state, next(token for token in ids if token != table.token_ids[0]))
                else:
                    state, lowest = table.advance(state, ids[-1 if lowest else 0]), False
                length += 1
            assert length <= table.longest <= 8


@pytest.mark.parametrize("legal", [RETREAT, BUILD], ids=lambda legal: legal.kind)
def test_orders_after_a_thought_are_spelled_read_and_weighed_as_without(tokens: Tokens, legal: LegalOrders):
    codec = tokens.codec
    thinking = thinking_of(codec, 4)
    assert thinking is not None
    plain, tables = TableBuilder(codec), TableBuilder(codec, thinking=thinking)
    table, without = tables.table(legal), plain.table(legal)
    assert table.longest == 4 + 1 + len(thinking.closing) + without.longest
    chosen = [legal.options[-1][-1], *["WAIVE"] * (legal.picks - 1)]
    orders = plain.spell(chosen, legal)
    for thought in ([], [7], [7, 8, 9, 10]):
        completion = thinking.enclose(thought, orders)
        assert thinking.split(completion) == (thought, orders)
        assert tables.read(completion, legal) == plain.read(orders, legal) == chosen
        weights = np.linspace(-3, -1, len(completion)).tolist()
        assert tables.order_logprobs(completion, weights) == plain.order_logprobs(orders, weights[-len(orders) :])
        ids, offsets = table.legal_sets(completion)
        expected, bounds = without.legal_sets(orders)
        assert ids[-len(expected) :].tolist() == expected.tolist()
        assert (offsets[-len(bounds) :] - offsets[-len(bounds)]).tolist() == bounds.tolist()
        assert int((ids < 0).sum()) == min(len(thought) + 1, 4)
        assert LegalTable.from_bytes(table.to_bytes()).legal_sets(completion)[0].tolist() == ids.tolist()


@pytest.mark.parametrize("cut", [0, 5])
def test_a_thought_that_does_not_end_is_refused(tokens: Tokens, cut: int):
    thinking = thinking_of(tokens.codec, 4)
    assert thinking is not None
    with pytest.raises(DataError):
        thinking.split(thinking.enclose([7, 8, 9, 10], [3])[:cut])
    with pytest.raises(DataError):
        thinking.split(thinking.enclose([7, 8, 9, 10, 11], [3]))


@pytest.mark.parametrize(("opening", "marker"), [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_a_tokenizer_with_tokens_for_thinking_uses_them(model: Path, tmp_path: Path, opening: str, marker: str):
    thinking = thinking_of(codec_with(model, tmp_path, opening, marker), 4)
    assert thinking is not None and thinking.cue == f"{opening}\n"
    codec = Codec(tmp_path)
    assert thinking.marker == codec.single_token(marker) != codec.separator_id
    assert codec.decode([thinking.marker, *thinking.closing]) == f"{marker}\n\nORDERS:\n"
    assert thinking.rule.end == codec.vocabulary_size == Codec(model).vocabulary_size + 2


def test_a_thought_holds_only_ids_that_tokenizer_and_model_have_and_no_end_token(model: Path, tmp_path: Path):
    codec = codec_with(model, tmp_path, "<think>", "</think>", "<|eot|>")
    known = codec.vocabulary_size
    for rows, ends, expected_end, excluded in (
        (known + 64, [0, known - 1], known, (0, known - 1)),
        (known + 64, [known - 1, 0, known - 1, -1, None], known, (0, known - 1)),
        (known - 1, [0, known - 1], known - 1, (0,)),
        (known - 3, 0, known - 3, (0,)),
        (None, [known + 5, 0], known + 6, (0, known + 5)),
    ):
        set_config(tmp_path, vocab_size=rows)
        set_config(tmp_path, "generation_config.json", eos_token_id=ends)
        codec = Codec(tmp_path)
        thinking = thinking_of(codec, 4)
        assert thinking is not None and (thinking.rule.end, thinking.rule.excluded) == (expected_end, excluded), rows
        assert codec.eos_id == (ends[0] if isinstance(ends, list) and ends[0] in excluded else 0)
        has_tags = rows is None or rows >= known - 1
        assert thinking.marker == (known - 2 if has_tags else codec.separator_id), "a token without a row is no marker"
        table = TableBuilder(codec, thinking=thinking).table(RETREAT)
        assert LegalTable.from_bytes(table.to_bytes()).thought == thinking.rule and table.largest_id < expected_end


def test_end_tokens_are_those_of_both_configs(model: Path, tmp_path: Path):
    codec_with(model, tmp_path)
    set_config(tmp_path, "generation_config.json", eos_token_id=[7, 9])
    set_config(tmp_path, eos_token_id=[0, 9])
    assert Codec(tmp_path).end_ids == (0, 7, 9) and Codec(tmp_path).eos_id == 7
    set_config(tmp_path, "generation_config.json", eos_token_id=Codec(model).separator_id)
    with pytest.raises(InputError, match=r"ends its turn with the line break after an order: take .* out of eos_token_id"):
        Codec(tmp_path)


def codec_with(model: Path, folder: Path, *added: str) -> Codec:
    """The codec of the small model, with added tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(model / "config.json", folder)
    set_config(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    set_config(folder, vocab_size=tokenizer.get_vocab_size())
    return Codec(folder)


def test_an_open_set_is_told_from_a_list_and_names_the_ids_that_it_leaves_out():
    sets = [np.array([4, 7]), open_set([0], 9), np.array([3]), open_set([8, 2], 9)]
    ids, offsets = np.concatenate(sets), np.array([0, 2, 4, 5, 8])

    is_open = open_sets(ids, offsets)

    assert is_open.tolist() == [False, True, False, True]
    assert excluded_ids(ids, offsets[:-1][is_open], np.diff(offsets)[is_open]).tolist() == [[0, 0], [2, 8]]
    assert ids[offsets[:-1] + 1][is_open].tolist() == [9, 9]


@pytest.mark.parametrize("excluded", [[], [-1], [9], [3, 3], [0, 9]], ids=str)
def test_an_open_set_excludes_some_of_its_own_ids(excluded: list[int]):
    with pytest.raises(ValueError, match="excludes some of its 9 ids"):
        open_set(excluded, 9)


@pytest.mark.parametrize("excluded", [[0], [3], [8], [0, 1], [3, 8, 4], [0, 2, 4, 6, 8]], ids=str)
def test_the_ids_of_a_set_can_be_counted_off_listed_or_open(excluded: list[int]):
    listed = np.array([token for token in range(9) if token not in excluded])
    for legal in (listed, open_set(excluded, 9)):
        assert [nth_id(legal, number) for number in range(set_size(legal))] == listed.tolist()


@pytest.fixture
def codec(stored_run: RunPaths) -> Codec:
    """Of a tokenizer without tokens for thinking."""
    (folder,) = (stored_run.root.parent / "_models").glob("tiny-*")
    return Codec(folder)


@pytest.fixture
def thinker(stored_run: RunPaths) -> Codec:
    """Of a tokenizer with tokens for thinking."""
    (folder,) = (stored_run.root.parent / "_models").glob("tiny-*")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    set_config(folder, vocab_size=tokenizer.get_vocab_size())
    return Codec(folder)


def ids(codec: Codec, text: str) -> list[int]:
    return list(codec.encode(text))


def test_without_tokens_for_thinking_the_line_break_ends_a_thought(codec: Codec):
    assert read_thought(ids(codec, "Take BER.\n"), codec) == ("Take BER.", False)
    assert read_thought(ids(codec, "Take BER."), codec) == ("Take BER.", True)
    assert read_thought(ids(codec, "</think>"), codec) == ("</think>", True), "letters are no token for thinking"


def test_a_token_for_thinking_ends_a_thought_that_may_have_line_breaks(thinker: Codec):
    marker = thinker.vocabulary_size - 1
    assert read_thought([*ids(thinker, "Take BER.\nHold.\n"), marker], thinker) == ("Take BER.\nHold.\n", False)
    assert read_thought(ids(thinker, "Take BER.\n"), thinker) == ("Take BER.\n", True)


def test_a_thought_is_the_positions_with_open_sets(codec: Codec):
    text, order = ids(codec, "BER?\n"), ids(codec, "A PAR H")
    completion = [*text, *order]
    sets = [open_set(codec.end_ids, codec.vocabulary_size)] * len(text) + [np.array([token, 500]) for token in order]
    offsets = np.cumsum([0, *map(len, sets)])
    logprobs = [-0.5] * len(text) + [-9.0] * len(order)
    found = thought_of(completion, logprobs, np.concatenate(sets), offsets, codec)
    assert found == Thought(tokens=len(text), logprob=-0.5 * len(text), text="BER?", truncated=False)
    found = thought_of(completion, logprobs, np.concatenate(sets).tolist(), offsets.tolist(), None)
    assert found == Thought(tokens=len(text), logprob=-0.5 * len(text), text=None, truncated=None)
    orders = sets[len(text) :]
    assert thought_of(order, [0.0] * len(order), np.concatenate(orders), np.cumsum([0, *map(len, orders)]), codec) is None
