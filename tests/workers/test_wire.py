"""Requests and answers survive the wire; what is not one is refused by field."""

from pathlib import Path

import msgpack
import numpy as np
import pytest

from decoding.legal_table import END, LegalTable
from decoding.thinking import ThoughtRule
from game.board import Board
from records.generation import Generation, GenerationCost, GenerationRequest
from records.policy_version import BASE, PolicyVersion
from rollouts.fork import Tokens
from telemetry.errors import DataError
from workers.wire import check_answer, pack_generation, pack_request, unpack_generation, unpack_request


@pytest.fixture
def request_sent(tokens: Tokens) -> GenerationRequest:
    legal = Board.start().legal_orders()["FRANCE"]
    return GenerationRequest(
        request_id="r/1",
        prompt_ids=[1, 2, 3],
        table=tokens.tables.table(legal),
        seed=2**62,
        temperature=0.5,
        snapshot_id="abc",
    )


def test_a_request_arrives_as_it_was_sent(request_sent: GenerationRequest, tokens: Tokens):
    three = PolicyVersion(version=3, adapter_hash="ab", adapter=Path("v3"))
    got, asked = unpack_request(pack_request(request_sent, three), tokens.codec.vocabulary_size)
    assert asked == three and asked.adapter is None and got.version == 3
    assert got.table.to_bytes() == request_sent.table.to_bytes()
    for name in ("request_id", "prompt_ids", "seed", "temperature", "snapshot_id"):
        assert getattr(got, name) == getattr(request_sent, name)


@pytest.mark.parametrize(
    "change",
    [
        {"table": b"no table"},
        {"offsets": [2**31 - 1, -2]},
        {"prompt_ids": b""},
        {"prompt_ids": np.array([10**6], "<i4").tobytes()},
        {"prompt_ids": b"123"},
        {"seed": 2**63},
        {"seed": "x"},
        {"temperature": float("nan")},
        {"temperature": 4.001},
        {"version": 2**31},
        {"request_id": ""},
        {"snapshot_id": [{}, {}]},
        {"more": {"inner": {}}},
    ],
    ids=str,
)
def test_a_request_with_a_bad_field_is_refused(request_sent: GenerationRequest, tokens: Tokens, change: dict):
    if "offsets" in change:  # the differences of these add up to the right sum if they wrap around at 32 bits
        offsets = np.array([0, *change["offsets"], 3], "<i4")
        ids, nexts = np.array([1, 2, 3], "<i4"), np.array([-1, -1, -1], "<i4")
        change = {"table": np.array([1, 3, 3, 1], "<i4").tobytes() + offsets.tobytes() + ids.tobytes() + nexts.tobytes()}
    body = msgpack.packb(msgpack.unpackb(pack_request(request_sent)) | change)
    with pytest.raises(DataError):
        unpack_request(body, tokens.codec.vocabulary_size)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"hello", msgpack.packb([1]), msgpack.packb({})], ids=repr)
def test_a_body_that_is_no_message_is_refused(body: bytes, tokens: Tokens):
    with pytest.raises(DataError):
        unpack_request(body, tokens.codec.vocabulary_size)
    with pytest.raises(DataError):
        unpack_generation(body)


def test_an_answer_arrives_as_it_was_sent():
    sent = Generation(
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.5, 0.0], np.float32),
        policy=PolicyVersion(version=3, adapter_hash="ab"),
        worker="w",
        cost=GenerationCost(queue_ms=1.5, prefill_ms=2.5, decode_ms=4.5, cached_tokens=32),
    )
    got, load = unpack_generation(pack_generation(sent, running=7, preemptions=2))
    assert (load.queue_ms, load.service_ms, load.running, load.preemptions) == (1.5, 7.0, 7, 2)
    assert got.token_ids.tolist() == [5, 6] and got.logprobs.tolist() == [-0.5, 0.0]
    assert (got.policy, got.worker, got.cost) == (sent.policy, "w", sent.cost)


def test_an_answer_with_as_many_logprobs_as_not_tokens_is_refused():
    sent = {"token_ids": np.zeros(2, "<i4").tobytes(), "logprobs": np.zeros(1, "<f4").tobytes()}
    with pytest.raises(DataError, match="2 tokens but 1 logprobs"):
        unpack_generation(msgpack.packb(sent))


THOUGHTFUL = LegalTable(
    offsets=np.array([0, 1, 3, 4], np.int32),
    token_ids=np.array([3, 1, 4, 5], np.int32),
    next_nodes=np.array([1, 2, 2, END], np.int32),
    longest=5,
    thought=ThoughtRule(budget=2, end=9, excluded=5),
)
"""Two tokens below 9 but not 5; 3 ends the thought; then 1 or 4; then 5."""


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "sentence"),
    [
        ([3, 1, 5], [-2, -1, 0], ""),
        ([8, 3, 1, 5], [-2, -2, -1, 0], ""),
        ([8, 0, 3, 4, 5], [-2, -2, 0, -1, 0], ""),
        ([5, 3, 1, 5], [-2, -2, -1, 0], "token 5 is not legal in a thought"),
        ([9, 3, 1, 5], [-2, -2, -1, 0], "token 9 is not legal in a thought"),
        ([8, 0, 8, 3, 4, 5], [-2, -2, -2, 0, -1, 0], "token 8 is not legal at node 0"),
        ([8, 0, 3, 4, 5], [-2, -2, -1, -1, 0], "log-probability at position 2 is -1.0"),
        ([8, 0, 3, 4, 5], [float("nan"), -2, 0, -1, 0], "log-probability at position 0 is nan"),
        ([8, 0], [-2, -2], "stops before its end"),
    ],
    ids=["no thought", "short", "whole budget", "end of sequence", "foreign", "too long", "not certain", "no number", "cut"],
)
def test_an_answer_with_a_thought_is_checked_token_by_token(token_ids: list[int], logprobs: list[float], sentence: str):
    answer = Generation(token_ids=np.array(token_ids, np.int32), logprobs=np.array(logprobs, np.float32), policy=BASE, worker="w")
    if not sentence:
        check_answer(answer, THOUGHTFUL, BASE)
        return
    with pytest.raises(DataError, match=sentence):
        check_answer(answer, THOUGHTFUL, BASE)
