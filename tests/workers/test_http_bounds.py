"""A client of a worker that is slow, silent, endless or many is refused plainly, and takes neither memory nor room for long."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from tests.workers.plain_worker import PlainEngine, WorkerHere
from tests.workers.test_pool import request_for, root
from tests.workers.test_worker_doors import knock
from workers import http_bounds
from workers.wire import pack_request

__all__ = ["request_for", "root"]  # fixtures
POST = b"POST /generate HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture
def end(model: Path, root: Path) -> Iterator[WorkerHere]:
    end = WorkerHere(PlainEngine("bounded"), model, root).start()
    yield end
    end.stop()


def connect(end: WorkerHere, sent: bytes = b"") -> socket.socket:
    line = socket.create_connection(("127.0.0.1", end.port), timeout=10)
    line.sendall(sent)
    return line


def answer(line: socket.socket) -> tuple[int, str]:
    """Status and kind of what comes until the other side closes; 0 where it closes without a word."""
    said = b""
    while piece := line.recv(65536):
        said += piece
    line.close()
    head, _, body = said.partition(b"\r\n\r\n")
    return (int(head.split()[1]), json.loads(body)["kind"]) if said else (0, "")


def test_a_header_that_does_not_end_is_refused_in_time(end, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_bounds, "HEAD_TIMEOUT_S", 0.3)
    lines = [connect(end, sent) for sent in (b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nhost: here\r\n")]
    assert {answer(line) for line in lines} == {(408, "slow")}
    assert knock(end, "/health")[0] == 200


def test_unfinished_bodies_hold_no_more_than_a_budget_and_give_it_back(end, request_for, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_bounds, "MAX_BYTES_IN_FLIGHT", 3 << 20)
    monkeypatch.setattr(http_bounds, "BODY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(http_bounds, "HEAD_TIMEOUT_S", 0.5)
    lines = [connect(end, POST % (1 << 20) + b"x" * 1000) for _ in range(8)]
    assert sorted(answer(line) for line in lines) == [(408, "slow")] * 3 + [(429, "busy")] * 5
    assert knock(end, "/generate", pack_request(request_for(1)))[0] == 200, "the budget is whole again"


def test_one_connection_too_many_is_refused_and_the_next_is_taken_when_there_is_room(end, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_bounds, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(http_bounds, "HEAD_TIMEOUT_S", 1.0)
    held = [connect(end) for _ in range(4)]
    assert answer(connect(end)) == (429, "busy")
    assert {answer(line) for line in held} == {(408, "slow")}
    assert knock(end, "/health")[0] == 200


def test_a_body_in_pieces_without_its_length_is_not_read(end):
    for method in (b"GET", b"POST"):
        line = connect(end, method + b" /health HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 413")
        line.close()


def test_a_client_that_hangs_up_prints_no_traceback(end, request_for, capfd, caplog):
    caplog.set_level(logging.INFO)
    end.engine.delay_s = 0.2
    body = pack_request(request_for(1))
    for sent in (b"", b"GET /hea", POST % 1000, POST % 1000 + b"half", POST % len(body) + body):
        for lingers in (True, False):
            line = connect(end, sent)
            time.sleep(0.05)
            if not lingers:  # a reset instead of an orderly end
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            line.close()
    publish = b"POST /publish HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    connect(end, publish).close()
    wait_until(lambda: end.worker.answers.in_flight == 0)
    assert knock(end, "/health")[0] == 200
    out, err = capfd.readouterr()
    assert (out, err) == ("", "") and not [record for record in caplog.records if record.levelno >= logging.WARNING]
