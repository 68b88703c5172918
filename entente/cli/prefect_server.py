"""The Prefect server of a command: the user's server, or one of our own that runs as long as the command.

Prefect can start a temporary server, but a killed command would leave it running. Ours ends with the command in every case. Its
database is in Prefect's home, so `prefect server start` shows the runs later.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from entente.cli.prefect_database import check_database
from entente.cli.server_key import open_url, send_key, want_key
from entente.telemetry.errors import InputError
from storage.files import check_writable, held

_ANSWERS_WITHIN_S = 10.0
_HANDS_OVER_WITHIN_S = 10.0
_STARTS_WITHIN_S = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"
_ended: set[str] = set()
"""Addresses of our own servers that have ended: a notebook calls several commands in one process, each with a server."""


@contextmanager
def prefect_server() -> Iterator[None]:
    """Within the block a Prefect server answers, and Prefect's settings have its address."""
    from prefect.settings import get_current_settings

    given = get_current_settings().api.url
    if given and given not in _ended:
        send_key(given)
        _reload_settings()
        _check(given)
        yield
        return
    os.environ.pop("PREFECT_API_URL", None)
    log = Path(os.environ["PREFECT_HOME"]) / "server.log"
    # Two servers that start at once without a database would both create its tables. After the time limit the second starts too.
    with held(log.with_name("server.starting"), wait_s=_limit_s()):
        process, address = _start(log)
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


def _start(log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server of our own that writes `log`, and wait until it answers; its process and address."""
    check_home()
    check_database()
    want_key()
    with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as out:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "entente.cli.serve_prefect", str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            # Ctrl-C reaches the command alone, which must still be able to tell the server how its run ended.
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


def check_home() -> None:
    """Check that a server on this machine can have its files in Prefect's home.

    Raises:
        InputError: names the folder and the cure.
    """
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

    given = get_current_settings().api
    check_address(address)
    if not given.key and not accepts(address, given.auth_string.get_secret_value() if given.auth_string else ""):
        raise InputError(f"the Prefect server at {address} wants another key: set PREFECT_API_AUTH_STRING to it")


def check_address(address: str) -> None:
    """Check that the API of a Prefect server answers at `address`, whatever key it wants.

    Raises:
        InputError: it does not; with the address that was meant, if one answers there.
    """
    try:
        if not address.endswith("/") and _ask(address, _ANSWERS_WITHIN_S):
            return
    except (OSError, ValueError, HTTPException) as error:
        raise InputError(
            f"no Prefect server answers at {address} ({_reason(error)}): start it with `prefect server start`, "
            "or unset PREFECT_API_URL to have one for the length of the command"
        ) from error
    meant = f"{urlsplit(address).scheme}://{urlsplit(address).netloc}/api"
    try:
        cure = f"set PREFECT_API_URL to {meant}" if _ask(meant, _ANSWERS_WITHIN_S) else ""
    except OSError:
        cure = ""
    cure = cure or "set PREFECT_API_URL to the server's address with /api at its end, or unset it"
    raise InputError(f"what answers at {address} is not the API of a Prefect server: {cure}")


def accepts(address: str, key: str) -> bool:
    """Whether the server at `address` accepts this key; an empty key: requests without one."""
    basic = {"Authorization": f"Basic {b64encode(key.encode()).decode()}"} if key else {}
    request = urllib.request.Request(f"{address}/admin/version", headers=basic)
    try:
        open_url(request, _ANSWERS_WITHIN_S).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        return answer.code not in (401, 403)
    return True


def wait_until_up(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return once the server of `process`, which writes `log`, answers at `address`."""
    limit = _limit_s()
    until = time.monotonic() + limit
    while True:
        if process.poll() is not None:
            raise InputError(
                f"the Prefect server did not come up (exit code {process.returncode}): {_last_words(log)}; "
                f"`entente doctor` looks for what does not fit, {log} has all"
            )
        try:
            _ask(address, 1.0)
            return
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"the Prefect server did not answer within {limit:g} s ({_reason(error)}): "
                    f"give it more with {_STARTS_WITHIN_S}"
                ) from error
            time.sleep(0.1)


def _limit_s() -> float:
    return float(os.environ.get(_STARTS_WITHIN_S, "120"))


def _flush_prefect() -> None:
    """Have Prefect's threads send the last states and log lines; without a server they would retry for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for service in (APILogWorker, EventsWorker):
        service.drain_all(timeout=_HANDS_OVER_WITHIN_S)


def _last_words(log: Path) -> str:
    """The last error in the server's log, or its last line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception): ", line)]
    return (errors or lines or ["it said nothing"])[-1].strip()


def _ask(address: str, timeout_s: float) -> bool:
    """Whether the server that answers at `address` is Prefect's, or asks for a login."""
    try:
        with open_url(urllib.request.Request(f"{address}/health"), timeout_s) as answer:
            return answer.read(16).strip() == b"true"
    except urllib.error.HTTPError as answer:
        answer.close()
        if answer.code >= 500:
            raise OSError(f"it answers with {answer.code}") from answer
        return answer.code in (401, 403)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error))


def _reload_settings() -> None:
    """Have Prefect read the environment again."""
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
