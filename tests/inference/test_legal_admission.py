"""Tables are read and checked once, wherever they come from, and those that a process made itself never."""

from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest

from entente.decoding.legal_table import END, LegalTable
from entente.game.legal import LegalOrders, OrderKind
from entente.inference.legal_admission import TableCache
from entente.telemetry.errors import DataError


def table(salt: int) -> LegalTable:
    return LegalTable(
        offsets=np.array([0, 1], np.int32),
        token_ids=np.array([salt], np.int32),
        next_nodes=np.array([END], np.int32),
        longest=1,
    )


def text(made: LegalTable) -> str:
    return text_of(made.to_bytes())


def text_of(data: bytes) -> str:
    return b64encode(data).decode()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bytes that were read and checked."""
    read, seen = LegalTable.from_bytes, []
    monkeypatch.setattr(LegalTable, "from_bytes", lambda data: (seen.append(data), read(data))[1])
    return seen


def test_a_table_that_was_built_here_is_known_by_its_text_and_never_read(tokens, reads: list[bytes]):
    orders = LegalOrders(power="ITALY", kind=OrderKind.RETREAT, sites=("A VEN",), options=(("A VEN D", "A VEN R ROM"),), picks=1)
    known, own = TableCache(), tokens.tables.table(orders)
    data = known.encode(own)
    assert known.decode(data) is own and known.decode("".join(list(data))) is own
    assert not reads


def test_a_table_that_was_put_together_by_hand_is_checked_like_any_other(reads: list[bytes]):
    known, broken = TableCache(), replace(table(3), next_nodes=np.array([7], np.int32))
    with pytest.raises(DataError, match="to an earlier node or outside"):
        known.decode(known.encode(broken))
    assert known.decode(known.encode(table(3))).is_sound and len(reads) == 2


def test_foreign_text_is_read_once_and_refused_each_time(reads: list[bytes]):
    known, good = TableCache(), text(table(3))
    assert known.decode(good) is known.decode(good) and reads == [table(3).to_bytes()]
    for _ in range(2):
        with pytest.raises(DataError):
            known.decode(good[:-4])
    assert len(reads) == 3


@pytest.mark.parametrize("bad", ["", "no base64!", "é", "AAAA", "A"])
def test_text_that_is_no_table_is_refused(bad: str):
    with pytest.raises(DataError):
        TableCache().decode(bad)


def test_the_longest_unused_is_forgotten_first(reads: list[bytes]):
    known = TableCache(size=2)
    first, second, third = (text(table(salt)) for salt in range(3))
    for data in (first, second, first, third, first):
        known.decode(data)
    assert [text_of(data) for data in reads] == [first, second, third]
    known.decode(second)
    assert text_of(reads[-1]) == second
