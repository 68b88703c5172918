"""What no engine takes is refused before it is counted or sent, in a sentence that names the request."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entente.decoding.legal_table import END, LegalTable, ThoughtRule
from entente.inference.engine import check_request
from entente.records.rows import GenerationRequest
from entente.telemetry.errors import EngineError

TABLE = LegalTable(
    offsets=np.array([0, 2, 3], np.int32),
    token_ids=np.array([1, 2, 9], np.int32),
    next_nodes=np.array([1, 1, END], np.int32),
    longest=2,
)
GOOD = GenerationRequest(request_id="r", prompt_ids=[0, 9], table=TABLE, seed=0, temperature=0.1)


def test_the_longest_request_with_the_largest_ids_is_taken():
    check_request(GOOD, 4, 10)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"prompt_ids": [0, 1, 2]}, "needs 5 tokens but max_model_length is 4: raise inference.max_model_length"),
        ({"prompt_ids": []}, "empty prompt or ids outside the vocabulary of 10"),
        ({"prompt_ids": [-1]}, "outside the vocabulary"),
        ({"prompt_ids": [10]}, "outside the vocabulary"),
        ({"table": replace(TABLE, token_ids=np.array([1, 2, 10], np.int32))}, "outside the vocabulary"),
        ({"table": replace(TABLE, thought=ThoughtRule(budget=1, end=11, excluded=(9,)))}, "outside the vocabulary"),
        *(({"temperature": bad}, "temperature .*: it must be above 0") for bad in (0.0, -1.0, float("nan"))),
    ],
)
def test_what_no_engine_takes_is_refused(changed: dict[str, Any], sentence: str):
    with pytest.raises(EngineError, match=f"request 'r' .*{sentence}"):
        check_request(replace(GOOD, **changed), 4, 10)
