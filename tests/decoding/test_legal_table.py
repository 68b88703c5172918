"""The automaton accepts exactly the legal sets, each by one path; everything else that claims to be a table is refused."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from decoding.legal_table import END, LegalTable
from game.board import Board
from game.legal import LegalOrders, OrderKind
from game.players import player
from rollouts.fork import Tokens
from telemetry.errors import DataError

MOVEMENT = LegalOrders(
    power="FRANCE",
    kind=OrderKind.MOVEMENT,
    sites=("F BRE", "A PAR"),
    options=(
        ("F BRE - ENG", "F BRE - MAO", "F BRE H"),
        ("A PAR - BUR", "A PAR - GAS", "A PAR H", "A PAR S F BRE"),
    ),
    picks=2,
)
RETREAT = LegalOrders(
    power="ITALY",
    kind=OrderKind.RETREAT,
    sites=("A VEN",),
    options=(("A VEN D", "A VEN R ROM", "A VEN R TUS"),),
    picks=1,
)
BUILD = LegalOrders(
    power="RUSSIA",
    kind=OrderKind.BUILD,
    sites=("MOS", "STP", "WAR"),
    options=(("A MOS B",), ("A STP B", "F STP/NC B", "F STP/SC B"), ("A WAR B",)),
    picks=2,
)
DISBAND = LegalOrders(
    power="TURKEY",
    kind=OrderKind.DISBAND,
    sites=("A ANK", "F CON", "A SMY", "F BLA"),
    options=(("A ANK D",), ("F CON D",), ("A SMY D",), ("F BLA D",)),
    picks=2,
)


def completions(table: LegalTable, node: int = 0) -> Iterator[tuple[int, ...]]:
    """Every completion that the table allows."""
    for token in table.allowed(node).tolist():
        following = table.advance(node, token)
        if following == END:
            yield (token,)
        else:
            yield from ((token, *rest) for rest in completions(table, following))


def legal_sets(legal: LegalOrders) -> set[tuple[str, ...]]:
    """Every legal order set, by brute force over what `admits` says, in canonical form."""
    texts = [text for options in legal.options for text in options]
    if legal.kind == OrderKind.BUILD:
        texts.append("WAIVE")
    return {orders for orders in itertools.product(texts, repeat=legal.picks) if legal.admits(orders)}


@pytest.mark.parametrize("legal", [MOVEMENT, RETREAT, BUILD, DISBAND], ids=lambda legal: legal.kind)
def test_the_table_accepts_exactly_the_legal_sets_each_by_one_path(tokens: Tokens, legal: LegalOrders):
    spelled = list(completions(tokens.tables.table(legal)))
    read = [tuple(tokens.tables.read(completion, legal)) for completion in spelled]
    assert len(set(spelled)) == len(spelled) == len(set(read))
    assert set(read) == legal_sets(legal)
    assert len(read) == legal.count()


@pytest.mark.parametrize("legal", [MOVEMENT, RETREAT, BUILD, DISBAND], ids=lambda legal: legal.kind)
def test_no_completion_begins_another_and_none_is_longer_than_the_table_says(tokens: Tokens, legal: LegalOrders):
    table = tokens.tables.table(legal)
    spelled = set(completions(table))
    assert not [c for c in spelled for cut in range(1, len(c)) if c[:cut] in spelled]
    assert max(map(len, spelled)) == table.longest


@pytest.mark.parametrize("legal", [MOVEMENT, RETREAT, BUILD, DISBAND], ids=lambda legal: legal.kind)
def test_the_path_of_an_order_set_is_how_it_is_spelled(tokens: Tokens, legal: LegalOrders):
    spelled = set(completions(tokens.tables.table(legal)))
    assert {tuple(tokens.tables.spell(orders)) for orders in legal_sets(legal)} == spelled


def test_real_positions_give_orders_that_the_board_takes_whole(tokens: Tokens):
    dice, kinds = random.Random(3), set()
    for _ in range(4):
        board = Board.start()
        for _ in range(45):
            legal = board.legal_orders()
            orders = {}
            for power, choice in legal.items():
                table, node, ids = tokens.tables.table(choice), 0, []
                while node != END:
                    ids.append(dice.choice(table.allowed(node).tolist()))
                    node = table.advance(node, ids[-1])
                orders[power] = tokens.tables.read(ids, choice)
                assert choice.admits(orders[power]), (power, orders[power])
                kinds.add(choice.kind)
            assert sum(board.step(orders).rejected.values()) == 0
    assert kinds == set(OrderKind)


def test_legal_sets_name_every_position_and_forced_ones_hold_one_id(tokens: Tokens):
    table = tokens.tables.table(MOVEMENT)
    completion = tokens.tables.spell(["F BRE - MAO", "A PAR H"])
    ids, offsets = table.legal_sets(completion)
    assert len(offsets) == len(completion) + 1 and offsets[-1] == len(ids)
    node = 0
    for position, token in enumerate(completion):
        here = ids[offsets[position] : offsets[position + 1]]
        assert here.tolist() == table.allowed(node).tolist() and token in here
        node = table.advance(node, token)


@pytest.mark.parametrize("cut", [slice(0, -1), slice(0, 0)], ids=["stops early", "is empty"])
def test_a_completion_that_stops_early_is_refused(tokens: Tokens, cut: slice):
    completion = tokens.tables.spell(["F BRE - MAO", "A PAR H"])[cut]
    with pytest.raises(DataError):
        tokens.tables.table(MOVEMENT).legal_sets(completion)


def test_a_token_outside_its_legal_set_is_refused(tokens: Tokens):
    completion = tokens.tables.spell(["F BRE - MAO", "A PAR H"])
    with pytest.raises(DataError, match="not legal"):
        tokens.tables.table(MOVEMENT).legal_sets([completion[0], completion[0], *completion[2:]])
    with pytest.raises(DataError, match="after its end"):
        tokens.tables.table(MOVEMENT).legal_sets([*completion, completion[0]])


@pytest.mark.parametrize("legal", [MOVEMENT, BUILD], ids=lambda legal: legal.kind)
def test_bytes_round_trip(tokens: Tokens, legal: LegalOrders):
    table = tokens.tables.table(legal)
    again = LegalTable.from_bytes(table.to_bytes(), tokens.codec.vocabulary_size)
    assert set(completions(again)) == set(completions(table)) and again.longest == table.longest


def test_every_single_integer_changed_is_refused_or_still_a_sound_table(tokens: Tokens):
    """No alteration may give a table on which a walk could loop, leave the vocabulary, or find nothing allowed."""
    data, size = tokens.tables.table(RETREAT).to_bytes(), tokens.codec.vocabulary_size
    words = np.frombuffer(data, "<i4")
    refused = 0
    for place in range(len(words)):
        for value in (-7, -1, 0, 1, words[place] + 1, 2**31 - 1):
            altered = words.copy()
            altered[place] = value
            try:
                table = LegalTable.from_bytes(altered.tobytes(), size)
            except DataError:
                refused += 1
                continue
            lengths = [len(completion) for completion in completions(table)]
            assert lengths and all(0 <= token < size for completion in completions(table) for token in completion)
    assert refused > 2 * len(words)


@pytest.mark.parametrize("data", [b"", b"123", b"\0" * 16, b"\xff" * 64], ids=["empty", "odd", "zeros", "ones"])
def test_bytes_that_are_no_table_are_refused(data: bytes):
    with pytest.raises(DataError):
        LegalTable.from_bytes(data)


def test_equal_legal_orders_share_one_table(tokens: Tokens):
    twin = LegalOrders(power="FRANCE", kind=OrderKind.MOVEMENT, sites=MOVEMENT.sites, options=MOVEMENT.options, picks=2)
    assert tokens.tables.table(twin) is tokens.tables.table(MOVEMENT)


def test_scripted_orders_have_a_path_too(tokens: Tokens):
    """What the teacher orders can be imitated: every scripted order set is spelled by the table."""
    dice, board = random.Random(5), Board.start()
    for _ in range(25):
        legal = board.legal_orders()
        orders = {power: player("mover")(choice, dice) for power, choice in legal.items()}
        for power, choice in legal.items():
            tokens.tables.table(choice).legal_sets(tokens.tables.spell(orders[power]))
        board.step(orders)
