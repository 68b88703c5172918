"""Homes of Prefect servers, with a database that has its tables: to make those is half of a server's start.

The database is made once for a release of Prefect, by Prefect's own command, and kept in pytest's cache.
"""

import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from storage.files import file_lock
from tests.waiting import wait_for

_MADE_WITHIN_S = 600.0
_FILE = "prefect.db"


def put_database(home: Path, config: pytest.Config) -> Path:
    """Give a server's home, which may be missing, a database that has all tables and no rows; the home.

    Where pytest has no cache (`-p no:cacheprovider`, as mutation tests run it) the server makes the tables itself.
    """
    home.mkdir(parents=True, exist_ok=True)
    if (cache := getattr(config, "cache", None)) is None:
        return home
    kept = cache.mkdir("prefect") / version("prefect")
    with file_lock(kept.with_name(f"{kept.name}.lock"), wait_s=_MADE_WITHIN_S) as mine:
        assert mine, f"{kept} is made by another process for more than {_MADE_WITHIN_S} s"
        if not kept.exists():
            shutil.rmtree(aside := kept.with_name(f"{kept.name}.part"), ignore_errors=True)
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            bare = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_API_")}
            subprocess.run(command, env=bare | {"PREFECT_HOME": str(aside)}, check=True, capture_output=True)
            aside.rename(kept)
    shutil.copyfile(kept / _FILE, home / _FILE)
    (home / _FILE).chmod(0o600)
    return home


@contextmanager
def serving(home: Path) -> Iterator[str]:
    """A server with that home, for all who ask, which ends with this process; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener, (home / "server.log").open("wb") as log:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "entente.prefect_server.serve", str(listener.fileno()), str(os.getpid())],
            pass_fds=[listener.fileno()],
            env=os.environ | {"PREFECT_HOME": str(home)},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for("a Prefect server", _MADE_WITHIN_S, lambda: _answers(address), lambda: _check(process, home))
        yield address
    finally:
        process.terminate()
        process.wait(timeout=60)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
            return answer.status == 200
    except OSError:
        return False


def _check(process: subprocess.Popen[bytes], home: Path) -> None:
    assert process.poll() is None, f"the Prefect server ended:\n{(home / 'server.log').read_text(errors='replace')[-3000:]}"
