"""The key of the server on this machine: made once, read by its owner alone, sent to this machine alone."""

import http.server
import os
import socket
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import pytest

from entente.prefect_server import server_key
from entente.prefect_server.environment import LOOPBACK, prepare_environment
from entente.prefect_server.own_server import who_answers
from entente.prefect_server.server_key import hold_port, key_file, send_key, want_key
from entente.telemetry.errors import InputError
from tests.http_here import Quiet

SENT, WANTED = "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(server_key, "_SOCKETS", ())  # another user of this machine may have a server at port 4200
    for name in (SENT, WANTED):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    return tmp_path / "home"


def test_a_key_is_made_once_for_its_owner_alone_from_its_first_byte_on(home: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    real = Path.write_text

    def written(file: Path, text: str) -> int:
        seen.append(stat.S_IMODE(file.stat().st_mode))
        return real(file, text)

    monkeypatch.setattr(Path, "write_text", written)
    before = os.umask(0)
    try:
        key = want_key()
    finally:
        os.umask(before)
    assert seen == [0o600] and stat.S_IMODE(key_file().stat().st_mode) == 0o600
    user, secret = key.split(":")
    assert user == "entente" and len(secret) >= 32
    assert os.environ[SENT] == os.environ[WANTED] == key == key_file().read_text().strip()
    assert [path.name for path in home.iterdir()] == ["key"]
    for name in (SENT, WANTED):
        monkeypatch.delenv(name)
    assert want_key() == key


def test_commands_that_begin_at_once_agree_on_one_key(monkeypatch: pytest.MonkeyPatch):
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: want_key(), range(8)))
    assert keys == {key_file().read_text().strip()}
    assert [path.name for path in key_file().parent.iterdir()] == ["key"]


def test_the_key_goes_to_this_machine_alone(monkeypatch: pytest.MonkeyPatch):
    key = want_key()
    for address, sent in [
        ("http://server.internal:4200/api", None),
        ("https://127.0.0.1.example.org/api", None),
        ("http://127.0.0.1:4200/api", key),
        ("http://localhost:4300/api", key),
        ("http://[::1]:4300/api", key),
    ]:
        monkeypatch.delenv(SENT, raising=False)
        monkeypatch.delenv(WANTED, raising=False)
        send_key(address)
        assert os.environ.get(SENT) == sent, address


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WANTED, "me:mine")
    assert want_key() == "me:mine" and os.environ[SENT] == "me:mine"
    assert not key_file().exists()


def test_a_key_that_the_user_set_for_the_server_here_goes_to_no_server_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WANTED, "me:mine")
    send_key("http://server.internal:4200/api")
    assert SENT not in os.environ
    send_key("http://127.0.0.1:4200/api")
    assert os.environ[SENT] == "me:mine"


LISTENS = "   0: {}:1068 {}:0000 0A 00000000:00000000 00:00000000 00000000 {:5d}        0 233805 1 0 100 0 0 10 0\n"


MAPPED = "0" * 16 + "FFFF0000"
PLACES = {
    "loopback": "0100007F",
    "any": "0" * 8,
    "::": "0" * 32,
    "::1": "0" * 24 + "01000000",
    "::ffff:0.0.0.0": MAPPED + "0" * 8,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_no_key_goes_to_a_process_of_another_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str):
    want_key()
    for name in (SENT, WANTED):
        monkeypatch.delenv(name)
    table = tmp_path / "tcp"
    monkeypatch.setattr(server_key, "_SOCKETS", (table, tmp_path / "tcp6"))
    for user, sent in ((os.geteuid() + 1, False), (os.geteuid(), True)):
        table.write_text("  sl  local_address rem_address\n" + LISTENS.format(place, "0" * len(place), user))
        with nullcontext() if sent else pytest.raises(InputError, match=r"another user listens at http://127\.0\.0\.1:4200"):
            send_key("http://127.0.0.1:4200/api")
        assert (SENT in os.environ) == sent


@pytest.mark.parametrize("place", ["127.0.0.1:port", "127.0.0.1:99999", "[::1"])
def test_an_address_that_has_no_possible_host_and_port_is_a_sentence(place: str):
    want_key()
    for name in (SENT, WANTED):
        os.environ.pop(name)
    for use in (send_key, hold_port):
        with pytest.raises(InputError, match="no Prefect server answers at"):
            use(f"http://{place}/api")


@pytest.mark.skipif(sys.platform != "linux", reason="the port is held on Linux")
def test_the_port_of_a_server_that_ended_stays_with_this_user():
    with hold_port("http://127.0.0.1:0") as held:
        place = held.getsockname()
        with socket.create_server(place, reuse_port=True), hold_port(f"http://localhost:{place[1]}/api") as of_a_worker:
            assert of_a_worker.getsockname() == place
        for host in ("127.0.0.1", ""):
            with pytest.raises(OSError, match="in use"):
                socket.create_server((host, place[1]))  # as of another user, who may not share it even with `reuse_port`
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(place)
        with socket.create_server(place, reuse_port=True), socket.create_connection(place):
            pass  # the server that `entente up` starts again
    with socket.create_server(("127.0.0.1", 0)) as other, hold_port(f"http://127.0.0.1:{other.getsockname()[1]}") as none:
        assert none.getsockname()[1] == 0


def test_a_key_that_others_can_read_is_refused():
    want_key()
    key_file().chmod(0o640)
    for name in (SENT, WANTED):
        os.environ.pop(name)
    with pytest.raises(InputError, match="others can read the server's key"):
        send_key("http://127.0.0.1:4200/api")


class Answers(Quiet):
    """Answers everything, as a server or as a proxy, and notes what it was sent."""

    def do_GET(self) -> None:
        self.server.heard.append(f"{self.path} {self.headers['Authorization']}")  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    do_CONNECT = do_GET


@contextmanager
def answering(host: str) -> Iterator[tuple[int, list[str]]]:
    """A server at that host: its port, and what it was sent."""
    kind = type(
        "Server", (http.server.ThreadingHTTPServer,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET}
    )
    with kind((host, 0), Answers) as server:
        server.heard = []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_address[1], server.heard
        finally:
            server.shutdown()


def by_httpx(url: str) -> None:
    httpx.get(f"{url}/health", headers={"Authorization": "Basic YTpr"})


def by_prefect(url: str) -> None:
    assert who_answers(url, "a:k") == "other"


@pytest.mark.parametrize("send", [by_prefect, by_httpx])
@pytest.mark.parametrize(
    "given", [{}, {"no_proxy": "a.example, b.example"}, {"NO_PROXY": "a.example"}, {"no_proxy": "*"}], ids=str
)
@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_what_is_sent_to_this_machine_never_passes_a_proxy(
    monkeypatch: pytest.MonkeyPatch, variable: str, given: dict[str, str], send: Callable[[str], None]
):
    without_proxies = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with answering("127.0.0.1") as (proxy, overheard), warnings.catch_warnings():
        monkeypatch.setattr(os, "environ", os.environ.copy())
        os.environ.clear()
        os.environ.update(without_proxies | given | {variable: f"http://127.0.0.1:{proxy}"})
        prepare_environment(debug=False)
        prepare_environment(debug=False)  # as each call in a notebook does
        for host in LOOPBACK if Path("/proc/net/if_inet6").exists() else LOOPBACK[:2]:
            with answering("::1" if host == "::1" else "127.0.0.1") as (port, heard):
                send(f"http://[{host}]:{port}/api" if ":" in host else f"http://{host}:{port}/api")
                assert heard == ["/api/health Basic YTpr"] and overheard == []
        for name in ("no_proxy", "NO_PROXY"):
            hosts = os.environ[name].split(",")
            assert len(hosts) == len({*hosts}) and (hosts == ["*"] or {*LOOPBACK, socket.gethostname().lower()} < {*hosts})
            assert hosts[0] == (*given.values(), "localhost")[0].split(",")[0], "what the user exempts stays exempt"


def test_without_a_proxy_the_variables_stay_away(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", environment := dict[str, str]())
    with warnings.catch_warnings():
        prepare_environment(debug=False)
    assert not any(name.lower().endswith("_proxy") for name in environment), "they would hide the proxy of a macOS system"
