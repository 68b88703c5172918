"""Tables are read and checked once, wherever they come from, and those that a process made itself never."""

import numpy as np
import pytest

from decoding.legal_table import END, LegalTable
from inference.legal_admission import KnownTables
from telemetry.errors import DataError


def table(salt: int) -> LegalTable:
    return LegalTable(
        offsets=np.array([0, 1], np.int32),
        token_ids=np.array([salt], np.int32),
        next_nodes=np.array([END], np.int32),
        longest=1,
    )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bytes that were read and checked."""
    read, seen = LegalTable.from_bytes, []
    monkeypatch.setattr(LegalTable, "from_bytes", lambda data: (seen.append(data), read(data))[1])
    return seen


def test_a_table_that_was_made_here_is_known_by_its_bytes_and_never_read(reads: list[bytes]):
    known, own = KnownTables(), table(3)
    data = known.keep(own)
    assert known.find(data) is own and known.find(bytes(bytearray(data))) is own
    assert not reads


def test_foreign_bytes_are_read_once_and_refused_each_time(reads: list[bytes]):
    known, data = KnownTables(), table(3).to_bytes()
    assert known.find(data) is known.find(data) and reads == [data]
    for _ in range(2):
        with pytest.raises(DataError):
            known.find(data[:-4])
    assert len(reads) == 3


def test_the_longest_unused_is_forgotten_first(reads: list[bytes]):
    known = KnownTables(size=2)
    first, second, third = (table(salt).to_bytes() for salt in range(3))
    for data in (first, second, first, third, first):
        known.find(data)
    assert reads == [first, second, third]
    known.find(second)
    assert reads[-1] == second
