"""The Prefect server of a command: the user's, or one of our own that stops with the command.

Prefect's own temporary server would outlive a killed command. Our database is in Prefect's home, so `prefect server start`
shows the runs later.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from entente.prefect_server.database import check_database
from entente.prefect_server.environment import LOOPBACK
from entente.prefect_server.server_key import SENT, WANTED, hold_port, send_key, want_key
from entente.telemetry.errors import InputError, one_line
from storage.files import check_writable, file_lock

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_ANSWERS_WITHIN_S = 30.0
"""A server on a busy machine has taken more than ten seconds; where nothing listens, the answer comes at once."""
_HANDS_OVER_WITHIN_S = 10.0
_STARTS_WITHIN_S = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
_ended: set[str] = set()
"""Addresses of our own stopped servers: a notebook calls several commands in one process, each with a server."""


@contextmanager
def prefect_server() -> Iterator[None]:
    """Within the block a Prefect server runs, and Prefect's settings have its address."""
    keys = {name: os.environ.get(name) for name in (SENT, WANTED)}
    try:
        with _server():
            yield
    finally:
        for name, value in keys.items():  # the next call may be for a server elsewhere
            if value is None:
                os.environ.pop(name, None)


@contextmanager
def _server() -> Iterator[None]:
    check_client()
    from prefect.settings import get_current_settings

    _reload_settings()  # a notebook may have set an address since an earlier call
    configured = get_current_settings().api.url
    if configured and configured not in _ended:
        with hold_port(configured):
            send_key(configured)
            _reload_settings()
            _check(configured)
            yield
        return
    os.environ.pop("PREFECT_API_URL", None)
    log = Path(os.environ["PREFECT_HOME"]) / "server.log"
    with hold_port("http://127.0.0.1:0") as held:
        # Two servers that start at once without a database would both create its tables. The second waits, up to the time limit.
        with file_lock(log.with_name("server.starting"), wait_s=_limit_s()):
            process, address = _start(log, held.getsockname()[1])
        try:
            os.environ["PREFECT_API_URL"] = address
            _reload_settings()
            yield
        finally:
            try:
                _flush_prefect()
            finally:
                _end(process)
                _ended.add(address)


def _start(log: Path, port: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start our own server, which writes `log`, and wait until it answers. `port`: 0 is any. Returns process and address."""
    check_home()
    check_database()
    want_key()
    with socket.create_server(("127.0.0.1", port), reuse_port=True) as listener, log.open("wb") as out:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "entente.prefect_server.serve", str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            # Ctrl-C must reach the command alone, which then reports the end of its run to the server.
            start_new_session=True,
            # The log is not as quiet as the terminal.
            env={name: value for name, value in os.environ.items() if not name.startswith("PREFECT_LOGGING_")},
        )
    try:
        wait_until_up(process, address, log)
    except BaseException:
        _end(process)
        raise
    return process, address


def check_client() -> None:
    """Raise InputError if Prefect's client cannot be made with the proxies and certificates that the environment names. It reads
    them for a server on this machine too."""
    import httpx

    try:
        httpx.Client().close()
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
        raise InputError(
            f"Prefect's client cannot use a proxy or certificate that the environment names ({one_line(error)}): install "
            "'socksio' for a SOCKS proxy; correct or unset ALL_PROXY, HTTP_PROXY, HTTPS_PROXY, NO_PROXY or SSL_CERT_FILE"
        ) from error


def check_home() -> None:
    """Raise InputError, with the folder and the fix, if a server on this machine cannot write to Prefect's home."""
    home = Path(os.environ.get("PREFECT_HOME") or ".prefect").absolute()
    check_writable(home, "PREFECT_HOME")
    if "?" in str(home) and not os.environ.get("PREFECT_API_DATABASE_CONNECTION_URL"):
        raise InputError(
            f"Prefect cannot open its database in '{home}', because a '?' ends the path in the database's address: "
            "rename that folder, or name another one with PREFECT_HOME"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _check(address: str) -> None:
    from prefect.settings import get_current_settings

    api = get_current_settings().api
    check_address(address)
    key = api.auth_string.get_secret_value() if api.auth_string else ""
    if not api.key and who_answers(address, key) == "refuses":
        raise InputError(f"the Prefect server at {address} wants another key: set PREFECT_API_AUTH_STRING to it")


def check_address(address: str) -> None:
    """Raise InputError if no Prefect API answers at `address`, whatever key it wants; suggests the right address if it finds
    one."""
    import httpx

    try:
        if not address.endswith("/") and who_answers(address) != "other":
            return
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(
            f"no Prefect server answers at {address} ({error}): start it with `prefect server start`, "
            "or unset PREFECT_API_URL to have one for the length of the command"
        ) from error
    meant = f"{urlsplit(address).scheme}://{urlsplit(address).netloc}/api"
    try:
        cure = f"set PREFECT_API_URL to {meant}" if who_answers(meant) != "other" else ""
    except httpx.HTTPError:
        cure = ""
    cure = cure or "set PREFECT_API_URL to the server's address with /api at its end, or unset it"
    raise InputError(f"what answers at {address} is not the API of a Prefect server: {cure}")


def who_answers(address: str, key: str = "", within_s: float = _ANSWERS_WITHIN_S) -> Literal["accepts", "refuses", "other"]:
    """Whether a Prefect server at `address` accepts `key` ("": none sent). Raises httpx.HTTPError if nothing answers or the
    server fails, and httpx.InvalidURL for a malformed address."""
    import httpx

    with prefect_client(address, key, within_s=within_s, retries=0) as client:
        for path in ("/health", "/admin/version"):  # health needs no key
            try:
                answer = client.request("GET", path)
            except httpx.HTTPStatusError as refused:
                answer = refused.response
            if answer.status_code >= 500:
                raise httpx.RemoteProtocolError(f"it answers with {answer.status_code}")
            if answer.status_code in (401, 403):
                return "refuses"
            if path == "/health" and answer.text.strip() != "true":
                return "other"
    return "accepts"


@contextmanager
def prefect_client(address: str, key: str, *, within_s: float, retries: int) -> Iterator["SyncPrefectClient"]:
    """Prefect's client of the server at `address`; `key` is "" if it requires none."""
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    # Requests to this machine, which include the key, bypass a proxy of the environment.
    http = {"timeout": within_s, "trust_env": urlsplit(address).hostname not in LOOPBACK}
    retried = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: retries})
    with retried, SyncPrefectClient(address, auth_string=key or None, httpx_settings=http) as client:
        yield client


def wait_until_up(process: subprocess.Popen[bytes], address: str, log: Path, since: int = 0) -> None:
    """`since`: bytes of `log` that earlier servers wrote."""
    import httpx

    limit = _limit_s()
    until = time.monotonic() + limit
    while True:
        if process.poll() is not None:
            raise InputError(
                f"the Prefect server did not come up (exit code {process.returncode}): {last_words(log, since)}; "
                f"`entente doctor` checks the environment, the log is {log}"
            )
        try:
            who_answers(address, within_s=1.0)
            return
        except httpx.HTTPError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"the Prefect server did not answer within {limit:g} s ({error}): raise {_STARTS_WITHIN_S}"
                ) from error
            time.sleep(0.1)


def _limit_s() -> float:
    return float(os.environ.get(_STARTS_WITHIN_S, "120"))


def _flush_prefect() -> None:
    """Make Prefect's threads send the last states and log lines; without a server they would retry for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for service in (APILogWorker, EventsWorker):
        service.drain_all(timeout=_HANDS_OVER_WITHIN_S)


def last_words(log: Path, since: int) -> str:
    """The last error that a program wrote to `log` after `since` bytes, else its last line."""
    lines = log.read_bytes()[since:].decode(errors="replace").strip().splitlines()
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception): ", line)]
    return (errors or lines or ["it wrote nothing"])[-1].strip()


def _reload_settings() -> None:
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
