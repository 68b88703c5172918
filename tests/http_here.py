"""Small HTTP servers on this machine, and the address that a command prints of its own."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests until the block ends; the server's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def address_of(process: "subprocess.Popen[str]") -> str:
    """The first address on this machine that it prints."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://127.0.0.1:"):
            return line.split()[0]
    raise AssertionError(process.communicate())
