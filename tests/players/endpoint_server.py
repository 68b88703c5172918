"""A small real HTTP server with a chat-completions route: it plays well, or lies, is slow, refuses, or hangs up."""

import json
import re
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from tests.http_here import Quiet

Behaviour = Callable[["Handler", dict[str, Any]], None]
_ORDER = re.compile(r"[AF] \S+ (?:[HBD]|[-RSC] .+)")


def last_orders(body: dict[str, Any]) -> list[str]:
    """A legal set, read from the prompt alone: the last listed order of each unit, as many as are asked for."""
    asked = body["messages"][-1]["content"].split("\n")
    last = {" ".join(line.split()[:2]): line for line in asked if _ORDER.fullmatch(line)}
    count = re.search(r"(?:BUILD|DISBAND) (\d+)", "\n".join(asked))
    places: dict[str, str] = {}  # a site can be built on once, as army or fleet
    for unit, order in last.items():
        places.setdefault(unit.split()[1][:3], order)
    return list(places.values())[: int(count[1]) if count else None]


def completion(text: Any, finish_reason: str = "stop", **usage: Any) -> dict[str, Any]:
    """The body of a 200."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage}


class Handler(Quiet):
    """Answers one request as the server's behaviour says."""

    protocol_version = "HTTP/1.1"
    server: "EndpointServer"  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.requests.append({"path": self.path, "headers": dict(self.headers.items()), "body": body})
        try:
            self.server.behaviour(self, body)
        except OSError:  # the client has given up
            self.close_connection = True

    def answer(self, content: Any, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        """Send a whole answer: bytes, or anything else as JSON."""
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(sent)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(sent)


class EndpointServer(ThreadingHTTPServer):
    """Serves on this machine until the block ends; `behaviour` may be changed at any time."""

    daemon_threads = True

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = behaviour
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def player(self) -> str:
        """Its name as a player."""
        return f"openai:some/model:free@{self.url}"

    def __enter__(self) -> "EndpointServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


def plays(handler: Handler, body: dict[str, Any]) -> None:
    """Give a legal set, one order a line."""
    handler.answer(completion("\n".join(last_orders(body)), total_tokens=700))


def chats(handler: Handler, body: dict[str, Any]) -> None:
    """A whole completion without any order."""
    handler.answer(completion("I would rather not.\x1b[31m"))


def half_json(handler: Handler, body: dict[str, Any]) -> None:
    handler.answer(b'{"choices": [{"message": {"content": "A PAR')


def a_page(handler: Handler, body: dict[str, Any]) -> None:
    handler.answer(b"<html>\x1b[2Jwelcome</html>", kind="text/html")


def endless(handler: Handler, body: dict[str, Any]) -> None:
    """A stream that never ends."""
    handler.send_response(200)
    handler.send_header("transfer-encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def hangs_up(handler: Handler, body: dict[str, Any]) -> None:
    handler.close_connection = True
    handler.connection.close()


def slow(handler: Handler, body: dict[str, Any]) -> None:
    time.sleep(1.0)
    plays(handler, body)


def deep(handler: Handler, body: dict[str, Any]) -> None:
    handler.answer(b"[" * 200_000)
