"""A client that is slow, silent, endless or many is refused plainly, and takes no memory for long."""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.types import Scope

from entente.play import http_server
from entente.play.http_server import BoundedBodies, bind, headers_of, is_too_long, make_server
from tests.waiting import wait_until

POST = b"POST /echo HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n"


def said(status: int, kind: str, text: str) -> JSONResponse:
    return JSONResponse({"kind": kind, "text": text}, status_code=status)


class End:
    """A server in a thread that gives a body back, after a while."""

    def __init__(self) -> None:
        self.delay_s, self.in_flight = 0.0, 0
        app = FastAPI()
        app.add_middleware(BoundedBodies, refuse=self._refuse, say=said)

        @app.get("/health")
        async def health() -> str:
            return "well"

        @app.post("/echo")
        async def echo(request: Request) -> int:
            self.in_flight += 1
            try:
                await asyncio.sleep(self.delay_s)
                return len(await request.body())
            finally:
                self.in_flight -= 1

        listener = bind("127.0.0.1", 0, None)
        self.port = listener.getsockname()[1]
        self.server = make_server(app, drain_s=1)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()

    @staticmethod
    def _refuse(scope: Scope):
        return said(413, "too_long", "no") if is_too_long(scope, headers_of(scope), 8 << 20) else None

    def knock(self, path: str, body: bytes | None = None) -> int:
        address = f"http://127.0.0.1:{self.port}{path}"
        return (httpx.get(address) if body is None else httpx.post(address, content=body)).status_code


@pytest.fixture
def end() -> Iterator[End]:
    end = End()
    yield end
    end.server.should_exit = True
    end.thread.join(timeout=10)


def connect(end: End, sent: bytes = b"") -> socket.socket:
    line = socket.create_connection(("127.0.0.1", end.port), timeout=10)
    line.sendall(sent)
    return line


def answer(line: socket.socket) -> tuple[int, str]:
    """Status and kind of the answer."""
    said = b""
    while b"}" not in said:
        said += line.recv(65536)
    line.close()
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["kind"]


def test_a_header_that_is_too_long_is_refused(end):
    line = connect(end, b"GET /health HTTP/1.1\r\nhost: here\r\nx: ")
    line.sendall(b"y" * (http_server.MAX_HEAD + 1))
    assert line.recv(65536).startswith(b"HTTP/1.1 400")
    line.close()
    assert end.knock("/health") == 200


def test_unfinished_bodies_hold_no_more_than_a_budget_and_give_it_back(end, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "MAX_BYTES_IN_FLIGHT", 3 << 20)
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.5)
    lines = [connect(end, POST % (1 << 20) + b"x" * 1000) for _ in range(8)]
    assert sorted(answer(line) for line in lines) == [(408, "slow")] * 3 + [(429, "busy")] * 5
    assert end.knock("/echo", b"whole") == 200, "the budget is whole again"


def test_one_connection_too_many_is_refused_and_the_next_is_taken_when_there_is_room(end):
    end.server.config.limit_concurrency = 4
    held = [connect(end) for _ in range(4)]
    wait_until(lambda: end.knock("/health") == 503)
    for line in held:
        line.close()
    wait_until(lambda: end.knock("/health") == 200)


def test_a_body_in_pieces_without_its_length_is_not_read(end):
    for method in (b"GET", b"POST"):
        line = connect(end, method + b" /health HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 413")
        line.close()


def test_a_client_that_hangs_up_prints_no_traceback(end, capfd, caplog):
    caplog.set_level(logging.INFO)
    end.delay_s = 0.2
    for sent in (b"", b"GET /hea", POST % 1000, POST % 1000 + b"half", POST % 4 + b"body"):
        for lingers in (True, False):
            line = connect(end, sent)
            time.sleep(0.05)
            if not lingers:  # a reset instead of an orderly end
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            line.close()
    wait_until(lambda: end.in_flight == 0)
    assert end.knock("/health") == 200
    out, err = capfd.readouterr()
    assert (out, err) == ("", "") and not [record for record in caplog.records if record.levelno >= logging.WARNING]
