"""The key of this machine's Prefect server. Anyone who has it can start runs, and so run programs as the server's user.

It is a file in Prefect's home, readable by its owner only. Servers that `entente` starts require it; it is sent to servers on
this machine only. Prefect's own authentication string, if set, takes precedence.
"""

import os
import secrets
from pathlib import Path
from urllib.parse import urlsplit

from entente.prefect_server.environment import LOOPBACK
from entente.telemetry.errors import InputError
from storage.files import publish_once

SENT, WANTED = "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"
_USER = "entente"


def key_file() -> Path:
    """The file exists after the first start of a server."""
    return Path(os.environ["PREFECT_HOME"]) / "key"


def send_key(address: str) -> None:
    """Send the key from this process and its children, if the server at `address` is on this machine and a key exists: the one
    that `WANTED` names for the servers of this machine, else that of the file."""
    if os.environ.get(SENT) or urlsplit(address).hostname not in LOOPBACK:
        return
    if key := os.environ.get(WANTED):
        os.environ[SENT] = key
    elif key_file().is_file():
        os.environ[SENT] = _read()


def want_key() -> str:
    """Create a missing key. Set and return the key that the next server requires and this process sends."""
    if not (os.environ.get(SENT) or os.environ.get(WANTED)) and not key_file().is_file():
        _make()
    send_key("http://127.0.0.1")
    return os.environ.setdefault(WANTED, os.environ[SENT])


def _make() -> None:
    """Create the file of the key, unless another process was faster."""

    def write(aside: Path) -> None:
        aside.touch(mode=0o600)
        aside.write_text(f"{_USER}:{secrets.token_urlsafe(32)}\n")

    publish_once(key_file(), write)


def _read() -> str:
    file = key_file()
    if file.stat().st_mode & 0o077:
        raise InputError(f"others can read the server's key in '{file}': remove it, then `entente down` and `entente up`")
    key = file.read_text().strip()
    if ":" not in key:
        raise InputError(f"'{file}' holds no key: remove it, then `entente down` and `entente up`")
    return key
