"""A client that sends too much, that hangs up, or that is one too many is refused plainly."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from entente.live_games import http_server
from entente.live_games.http_server import bind, foreign_header, make_server, signals_end_here
from entente.live_games.server import play_app
from tests.waiting import wait_until

HEAD = "%s %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-entente-key: key\r\n%s\r\n"


class End:
    """The server of a game, in a thread."""

    def __init__(self, game) -> None:
        listener = bind("127.0.0.1", 0, None)
        self.port = listener.getsockname()[1]
        self.server = make_server(play_app(game, ("dumbbot",), "key", f"127.0.0.1:{self.port}"), drain_s=1)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()

    def knock(self) -> int:
        return httpx.get(f"http://127.0.0.1:{self.port}/game?key=key").status_code

    def connect(self, sent: bytes = b"") -> socket.socket:
        line = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        line.sendall(sent)
        return line

    def head(self, method: str, path: str, more: str = "") -> bytes:
        return (HEAD % (method, path, self.port, more)).encode()


@pytest.fixture
def end(new_game) -> Iterator[End]:
    end = End(new_game("FRANCE"))
    yield end
    end.server.should_exit = True
    end.thread.join(timeout=10)


def test_a_header_that_is_too_long_is_refused(end):
    line = end.connect(end.head("GET", "/game")[:-2] + b"x: ")
    line.sendall(b"y" * (http_server.MAX_HEAD + 1))
    assert line.recv(65536).startswith(b"HTTP/1.1 400")
    line.close()
    assert end.knock() == 200


def test_port_80_is_the_same_address_with_and_without_it():
    own = ["127.0.0.1:80", "localhost:80"]
    for host in (b"127.0.0.1", b"localhost:80"):
        assert foreign_header({b"host": host, b"origin": b"http://" + host}, own) is None
    assert foreign_header({b"host": b"127.0.0.1"}, ["127.0.0.1:8080"]) == "host"


def test_one_connection_too_many_is_refused_and_the_next_is_taken_when_there_is_room(end):
    end.server.config.limit_concurrency = 4
    held = [end.connect() for _ in range(4)]
    wait_until(lambda: end.knock() == 503)
    for line in held:
        line.close()
    wait_until(lambda: end.knock() == 200)


def test_a_body_in_pieces_without_its_length_is_not_read(end):
    for method, path in (("GET", "/game"), ("POST", "/orders")):
        line = end.connect(end.head(method, path, "transfer-encoding: chunked\r\n") + b"1\r\nx\r\n")
        assert line.recv(65536).startswith(b"HTTP/1.1 413")
        line.close()


def test_a_client_that_hangs_up_prints_no_traceback(end, capfd, caplog):
    caplog.set_level(logging.INFO)
    post = end.head("POST", "/orders", "content-length: 1000\r\n")
    for sent in (b"", b"GET /hea", post, post + b"half"):
        for lingers in (True, False):
            line = end.connect(sent)
            time.sleep(0.05)
            if not lingers:  # a reset instead of an orderly end
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            line.close()
    assert end.knock() == 200
    out, err = capfd.readouterr()
    assert (out, err) == ("", "") and not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ended_a_server_is_not_heard_again_by_whoever_reads_the_wakeup_pipe(number: int):
    """A thread that reads late would take it for one that came after the shutdown, and end the command with 130."""
    reader, writer = os.pipe()
    for each in (reader, writer):
        os.set_blocking(each, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with signals_end_here():
            signal.raise_signal(number)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        handler = signal.signal(number, lambda *_: None)
        signal.raise_signal(number)
        signal.signal(number, handler)
        assert os.read(reader, 1) == bytes([number])
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
