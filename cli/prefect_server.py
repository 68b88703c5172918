"""The Prefect server that a command's flows report to: the user's, or one of our own for as long as the command runs.

Prefect would start a temporary server by itself, but a killed command would leave that running for ever. Ours ends with the
command, however the command ends; its database is that of Prefect's home, so `prefect server start` shows the runs later.
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
from pathlib import Path

from cli.server_key import send_key, want_key
from storage.runs import held
from telemetry.errors import InputError

_ANSWERS_WITHIN_S = 10.0
_HANDS_OVER_WITHIN_S = 10.0
_STARTS_WITHIN_S = "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"


@contextmanager
def prefect_server() -> Iterator[None]:
    """For the length of the block there is a Prefect server that answers, and Prefect knows its address.

    Raises:
        InputError: the server that PREFECT_API_URL or the Prefect profile names does not answer, or ours does not come up.
    """
    from prefect.settings import get_current_settings

    given = get_current_settings().api.url
    if given:
        send_key(given)
        _tell_prefect()
        _check(given)
        yield
        return
    log = Path(os.environ["PREFECT_HOME"]) / "server.log"
    # Two that begin at once on a home without a database would both make its tables. One whose turn never comes begins anyway.
    with held(log.with_name("server.starting"), wait_s=_limit_s()):
        process, address = _begin(log)
    try:
        os.environ["PREFECT_API_URL"] = address
        _tell_prefect()
        yield
    finally:
        try:
            _send_what_is_left()
        finally:
            _end(process)


def _begin(log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server of our own that writes `log` and answers by now, and its address."""
    want_key()
    with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as out:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli.serve_prefect", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            # Ctrl-C reaches the command alone, which must still be able to tell the server how its run ended.
            start_new_session=True,
            # What the terminal is spared belongs into the log.
            env={name: value for name, value in os.environ.items() if not name.startswith("PREFECT_LOGGING_")},
        )
    try:
        wait_until_up(process, address, log)
    except BaseException:
        _end(process)
        raise
    return process, address


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _check(address: str) -> None:
    from prefect.settings import get_current_settings

    told = get_current_settings().api
    try:
        _ask(address, _ANSWERS_WITHIN_S)
        if not told.key and not accepts(address, told.auth_string.get_secret_value() if told.auth_string else ""):
            raise InputError(f"the Prefect server at {address} wants another key: set PREFECT_API_AUTH_STRING to it")
    except OSError as error:
        raise InputError(
            f"no Prefect server answers at {address} ({_reason(error)}): start it with `prefect server start`, "
            "or unset PREFECT_API_URL to have one for the length of the command"
        ) from error


def accepts(address: str, key: str) -> bool:
    """Whether the server there answers to this key; empty: to nobody in particular.

    Raises:
        OSError: nothing answers.
    """
    basic = {"Authorization": f"Basic {b64encode(key.encode()).decode()}"} if key else {}
    request = urllib.request.Request(f"{address}/admin/version", headers=basic)
    try:
        urllib.request.urlopen(request, timeout=_ANSWERS_WITHIN_S).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        return answer.code not in (401, 403)
    return True


def wait_until_up(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return once the server of `process`, which writes `log`, answers at `address`.

    Raises:
        InputError: it ended, or does not answer in time.
    """
    limit = _limit_s()
    until = time.monotonic() + limit
    while True:
        if process.poll() is not None:
            raise InputError(
                f"the Prefect server did not come up (exit code {process.returncode}): {_last_words(log)}; "
                f"`entente doctor` looks for what does not fit, {log} has all"
            )
        try:
            return _ask(address, 1.0)
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"the Prefect server did not answer within {limit:g} s ({_reason(error)}): "
                    f"give it more with {_STARTS_WITHIN_S}"
                ) from error
            time.sleep(0.1)


def _limit_s() -> float:
    return float(os.environ.get(_STARTS_WITHIN_S, "120"))


def _send_what_is_left() -> None:
    """Let Prefect's own threads hand over the last states and log lines; without a server they would try for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for service in (APILogWorker, EventsWorker):
        service.drain_all(timeout=_HANDS_OVER_WITHIN_S)


def _last_words(log: Path) -> str:
    """The last error that the server wrote, or its last line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception): ", line)]
    return (errors or lines or ["it said nothing"])[-1].strip()


def _ask(address: str, timeout_s: float) -> None:
    """Return if anything answers there at all; a server that wants a login is one that is up.

    Raises:
        OSError: nothing does.
    """
    try:
        urllib.request.urlopen(f"{address}/health", timeout=timeout_s).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        if answer.code >= 500:
            raise OSError(f"it answers with {answer.code}") from answer


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", error))


def _tell_prefect() -> None:
    """Have it read the environment again."""
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()
