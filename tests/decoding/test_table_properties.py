"""For any legal orders, the table accepts exactly the legal sets, and every path ends."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entente.decoding.codec import Codec
from entente.decoding.legal_table import END, LegalTable
from entente.decoding.option_trie import TokenLines, assemble
from entente.decoding.table_builder import TableBuilder
from entente.game.legal import LegalOrders, OrderKind
from entente.players.policy import Tokens
from entente.telemetry.errors import InputError

PLACES = ("BUL", "CON", "GRE", "MAO", "SPA", "STP")
ENDS = ("", "/NC", "/SC", "/EC")
EITHER = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


def orders_of(kind: OrderKind, place: str) -> list[str]:
    """Orders of one site to draw from, including coasts, convoys, and texts that are a prefix of another."""
    if kind is OrderKind.BUILD:
        return [f"A {place} B", *(f"F {place}{coast} B" for coast in ENDS)]
    if kind is OrderKind.DISBAND:
        return [f"F {place} D"]
    others = [other for other in PLACES if other != place]
    if kind is OrderKind.RETREAT:
        return [f"F {place} D", *(f"F {place} R {other}{coast}" for other in others for coast in ENDS)]
    return [
        f"F {place} H",
        *(f"F {place} - {other}{end}" for other in others for end in (*ENDS, " VIA")),
        *(f"F {place} S A {other}" for other in others),
        *(f"F {place} S A {other} - {goal}" for other in others for goal in others if goal != other),
        *(f"F {place} C A {other} - {goal}" for other in others for goal in others if goal != other),
    ]


@st.composite
def legal_orders(draw: st.DrawFn) -> LegalOrders:
    kind = draw(st.sampled_from(list(OrderKind)))
    places = sorted(draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=4, unique=True)))
    most = 3 if len(places) > 2 else 9
    options = [
        sorted(draw(st.lists(st.sampled_from(orders_of(kind, place)), min_size=1, max_size=most, unique=True)))
        for place in places
    ]
    picks = draw(st.integers(1, len(places))) if kind in (OrderKind.BUILD, OrderKind.DISBAND) else len(places)
    sites = tuple(places) if kind is OrderKind.BUILD else tuple(f"F {place}" for place in places)
    return LegalOrders(power="TURKEY", kind=kind, sites=sites, options=tuple(map(tuple, options)), picks=picks)


def completions(table: LegalTable, node: int = 0) -> Iterator[tuple[int, ...]]:
    for token, following in zip(
        table.allowed(node).tolist(), table.next_nodes[table.offsets[node] : table.offsets[node + 1]].tolist(), strict=True
    ):
        for rest in [()] if following == END else completions(table, following):
            yield (token, *rest)


def spelled_sets(codec: Codec, legal: LegalOrders) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Oracle: token ids -> orders of every legal set, by brute force. The table must accept exactly these."""
    texts = sorted({text for own in legal.options for text in own} | ({"WAIVE"} if legal.kind is OrderKind.BUILD else set()))
    found = {}
    for orders in itertools.product(texts, repeat=legal.picks):
        if legal.admits(orders):
            ids = [token for order in orders for token in (*codec.encode_order(order), codec.separator_id)]
            found[(*ids[:-1], codec.eos_id)] = orders
    return found


@EITHER
@given(legal=legal_orders())
def test_a_table_is_exactly_the_legal_sets_each_spelled_in_one_way(tokens: Tokens, legal: LegalOrders):
    builder = TableBuilder(tokens.codec)
    table, expected = builder.table(legal), spelled_sets(tokens.codec, legal)
    accepted = list(completions(table))
    assert len(accepted) == len(set(accepted)) == legal.count()
    assert set(accepted) == set(expected)
    assert max(map(len, accepted)) == table.longest
    for ids, orders in expected.items():
        assert builder.read(ids, legal) == list(orders)
        assert builder.spell(orders, legal) == list(ids)
        # Each line is the tokenizer's own encoding, so no set has a second path that decodes to the same text.
        assert tokens.codec.decode(ids[:-1]).split("\n") == [
            tokens.codec.decode(tokens.codec.encode_order(line)) for line in tokens.codec.decode(ids[:-1]).split("\n")
        ]


@EITHER
@given(legal=legal_orders())
def test_a_table_read_from_bytes_is_checked_and_equal(tokens: Tokens, legal: LegalOrders):
    table = tokens.tables.table(legal)
    again = LegalTable.from_bytes(table.to_bytes())
    for name in ("offsets", "token_ids", "next_nodes"):
        assert np.array_equal(getattr(again, name), getattr(table, name)) and getattr(again, name).dtype == np.int32
    assert again.longest == table.longest and again.to_bytes() is again.to_bytes() and again.to_bytes() == table.to_bytes()


@pytest.mark.parametrize("second", [(4, 5), (4, 5, 6), (4,)], ids=["the same", "longer", "shorter"])
def test_options_that_no_end_mark_parts_are_refused(second: tuple[int, ...]):
    lines = TokenLines()
    rows = lines.add([(4, 5), second])
    with pytest.raises(InputError, match="no end mark separates them"):
        assemble(lines, rows, [0, 0], [END, END])


def test_an_order_is_tokenised_once_and_a_table_built_once(tokens: Tokens, model, monkeypatch: pytest.MonkeyPatch):
    codec, encoded = Codec(model), []
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda text: (encoded.append(text), encode(text))[1])
    builder = TableBuilder(codec)
    one = LegalOrders(power="TURKEY", kind=OrderKind.MOVEMENT, sites=("F CON",), options=(("F CON - BLA", "F CON H"),), picks=1)
    wider = LegalOrders(
        power="TURKEY", kind=OrderKind.MOVEMENT, sites=("F CON",), options=(("F CON - AEG", "F CON - BLA", "F CON H"),), picks=1
    )
    assert builder.table(one) is builder.table(one)
    builder.table(wider)
    assert encoded == ["ORDERS:\nF CON - BLA\nF CON H\nF CON - BLA", "ORDERS:\nF CON - AEG\nF CON - AEG"]
    assert builder.table.cache_info().misses == 2
