"""The key of this machine's Prefect server. Anyone who has it can start runs, and so run programs as the server's user.

It is a file in Prefect's home, readable by its owner only. Servers that `entente` starts require it; it is sent to servers on
this machine only. Prefect's own authentication string, if set, takes precedence.
"""

import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from entente.prefect_server.environment import LOOPBACK
from entente.telemetry.errors import InputError
from storage.files import publish_once

SENT, WANTED = "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"
_USER = "entente"
_SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""The kernel's tables of sockets, with the user of each: proc_net_tcp(5)."""
_LISTENS = "0A"
_MAPPED = "0000000000000000FFFF0000"
_HOSTS = ("0100007F", "00000000", "0" * 32, "0" * 24 + "01000000", _MAPPED + "0100007F", _MAPPED + "00000000")
"""Loopback and any address there, as a little-endian machine writes them; IPv4 ones also as IPv6 maps them."""


def key_file() -> Path:
    """The file exists after the first start of a server."""
    return Path(os.environ["PREFECT_HOME"]) / "key"


def send_key(address: str) -> None:
    """Send the key from this process and its children, if the server at `address` is on this machine and a key exists: the one
    that `WANTED` names for the servers of this machine, else that of the file. Raises InputError if another user's process
    listens there, which would get it."""
    if os.environ.get(SENT) or _place(address)[0] not in LOOPBACK:
        return
    if key := os.environ.get(WANTED) or _read():
        check_listener(address)
        os.environ[SENT] = key


def want_key() -> str:
    """Create a missing key. Set and return the key that the next server requires and this process sends."""
    if not (os.environ.get(SENT) or os.environ.get(WANTED)) and not key_file().is_file():
        _make()
    key = os.environ.get(SENT) or os.environ.get(WANTED) or _read()
    os.environ[SENT] = key
    return os.environ.setdefault(WANTED, key)


def check_listener(address: str) -> None:
    """Raise InputError if a process of another user, besides root, listens at the port of this address of this machine. Without
    /proc, as on macOS, nothing tells."""
    _, port = _place(address)
    for table in _SOCKETS:
        for line in table.read_text().splitlines()[1:] if table.is_file() else ():
            _, local, _, state, _, _, _, user, *_ = line.split()
            host, _, its_port = local.rpartition(":")
            if state == _LISTENS and int(its_port, 16) == port and host in _HOSTS and int(user) not in (0, os.geteuid()):
                raise InputError(
                    f"a process of another user listens at {address}, and a server there could run programs as you: use another "
                    f"port (`entente up --port`); if you trust that server, set {SENT} to its key"
                )


def hold_port(address: str) -> socket.socket:
    """A socket that keeps the port of a server of ours at 127.0.0.1 for this user, on Linux, while a process has it open: after
    the server's end no process of another user can listen there, and get the key. Port 0: any free one.

    It does not listen, so without a server a connection is refused at once. The server shares the port: `reuse_port`."""
    host, port = _place(address)
    held = socket.socket()
    if sys.platform == "linux" and host in LOOPBACK:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        with suppress(OSError):  # a server that `entente` did not start shares its port with nobody
            held.bind(("127.0.0.1", port))
    return held


def _place(address: str) -> tuple[str | None, int]:
    """Host and port. Raises InputError for an address that has none."""
    try:
        place = urlsplit(address)
        port = {"https": 443}.get(place.scheme, 80) if place.port is None else place.port
    except ValueError as error:
        raise InputError(f"no Prefect server answers at {address} ({error}): correct PREFECT_API_URL, or unset it") from error
    return place.hostname, port


def _make() -> None:
    """Create the file of the key, unless another process was faster."""

    def write(aside: Path) -> None:
        aside.touch(mode=0o600)
        aside.write_text(f"{_USER}:{secrets.token_urlsafe(32)}\n")

    publish_once(key_file(), write)


def _read() -> str:
    """The key in the file; empty without one."""
    file = key_file()
    if not file.is_file():
        return ""
    if file.stat().st_mode & 0o077:
        raise InputError(f"others can read the server's key in '{file}': remove it, then `entente down` and `entente up`")
    key = file.read_text().strip()
    if ":" not in key:
        raise InputError(f"'{file}' holds no key: remove it, then `entente down` and `entente up`")
    return key
