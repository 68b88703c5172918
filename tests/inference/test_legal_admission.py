"""A table that comes from outside is read and checked once, and refused each time if it is none."""

from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest

from entente.decoding.legal_table import END, LegalTable
from entente.inference.legal_admission import decode_table, encode_table
from entente.telemetry.errors import DataError

TABLE = LegalTable(
    offsets=np.array([0, 1], np.int32),
    token_ids=np.array([3], np.int32),
    next_nodes=np.array([END], np.int32),
    longest=1,
)


def test_a_table_is_read_once_whatever_text_holds_it():
    text = encode_table(TABLE)
    assert decode_table(text) is decode_table("".join(list(text))) and decode_table(text).to_bytes() == TABLE.to_bytes()


OUTSIDE = encode_table(replace(TABLE, next_nodes=np.array([7], np.int32)))
CYCLE = LegalTable(
    offsets=np.array([0, 1, 2], np.int32), token_ids=np.array([3, 4], np.int32), next_nodes=np.array([1, 0], np.int32), longest=2
)
BROKEN = b64encode(TABLE.to_bytes()[:-4]).decode()


@pytest.mark.parametrize(
    "bad", ["", "no base64!", "!" + encode_table(TABLE), "é", "AAAA", "A", BROKEN, OUTSIDE, encode_table(CYCLE)]
)
def test_text_that_is_no_table_is_refused_each_time(bad: str):
    for _ in range(2):
        with pytest.raises(DataError):
            decode_table(bad)
