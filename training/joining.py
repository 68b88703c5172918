"""How a process joins a trainer: the messages between its first process, the leader, and the others, the followers.

A follower connects to the leader's address. Both send JSON lines:

    follower  who it is: its program, its host, the run that it wants      `Hello`
    leader    the run and its base model, or why it is refused             `Offer`, {"refused": sentence}
    follower  that it has found the base model                             {"ready": true}
    leader    its place, once all processes are ready                      `Place`

The connection then stays open, and each side takes its end for the end of the other; a follower that fails says why first,
{"failed": sentence}. The kernel's keepalive ends it half a minute after a machine or the network was lost. Rows, weights and
gradients never travel here, but by torch.distributed.
"""

import contextlib
import hashlib
import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from pydantic import TypeAdapter

from telemetry.errors import InputError
from telemetry.machine import package_version

KEY_VARIABLE = "ENTENTE_KEY"
"""Environment variable with the key that both sides must have where the leader's address is not a loopback one."""
_ROOMS = ("decoding", "records", "storage", "telemetry", "training")
"""The rooms whose code a follower runs."""
_SOURCE = Path(__file__).resolve().parents[1]
"""The folder in which the rooms lie."""
_LIBRARIES = ("torch", "transformers", "peft", "numpy")
_IDLE_S, _INTERVAL_S, _PROBES = 10, 5, 4
"""Keepalive: seconds of silence before the first probe, between probes, and unanswered probes that end a connection."""
_Kind = TypeVar("_Kind")
_LONGEST = 1 << 20
"""Bytes of the longest line that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who wants to join."""

    program: str
    """`program()` of the follower."""
    host: str
    """Name of its machine."""
    local_rank: int
    """Its number on its machine, from 0; the number of its GPU."""
    run: str = ""
    """The run that it must be; empty: any."""
    key: str = ""
    """The key, if it has one."""
    started_by: str = ""
    """A secret that the leader gave to the followers it started itself; empty: another machine's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the leader trains."""

    run: str
    model: str
    """Folder of the base model on the leader's machine."""
    base: str
    """`base_identity` of the base model."""
    device: str
    """cpu or cuda."""
    threads: int
    """CPU threads of torch in each process; the same number gives the same bits."""
    settings: Mapping[str, Any]
    """The training settings, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A follower's place in the process group."""

    rank: int
    size: int
    port: int
    """Port of the store at the leader's address, by which torch.distributed finds the other processes."""
    token: str
    """Prefix of the keys in that store; nobody else knows it."""


class Line:
    """One connection, as JSON lines. It is closed with the process or by `close`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _INTERVAL_S), ("TCP_KEEPCNT", _PROBES)):
            if hasattr(socket, option):  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._connection = connection
        self._received = connection.makefile("rb")
        self.own_address: str = connection.getsockname()[0]
        """The address of this machine by which the other side is reached."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one line.

        Raises:
            OSError: the connection has ended.
        """
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, within_s: float | None = None) -> dict[str, Any]:
        """The next line.

        Raises:
            OSError: the connection has ended, or nothing came within that time.
            ValueError: the line is no JSON object.
        """
        self._connection.settimeout(within_s)
        line = self._received.readline(_LONGEST)
        self._connection.settimeout(None)
        if not line:
            raise ConnectionResetError("the connection has ended")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("the line is no JSON object")
        return message

    def last_words(self) -> str:
        """Wait until the other side has ended; returns what it said that went wrong, or an empty text."""
        with contextlib.suppress(OSError, ValueError):
            return str(self.receive().get("failed", ""))
        return ""

    def close(self) -> None:
        """End the connection; the other side notices it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._received.close()
        self._connection.close()


def as_message(part: Hello | Offer | Place) -> dict[str, Any]:
    """The fields of a message."""
    return asdict(part)


def read_message(kind: type[_Kind], fields: Mapping[str, Any]) -> _Kind:
    """The message with these fields.

    Raises:
        ValueError: a field is missing or of another type. Other fields are ignored, so that another program can be told so.
    """
    return TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)


def read_address(address: str) -> tuple[str, int]:
    """Host and port of an address such as 10.0.0.1:29500 or [::1]:29500.

    Raises:
        InputError: it is none.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InputError(f"'{address}' is no address of a trainer: give HOST:PORT, such as 10.0.0.1:29500")
    return host, int(port)


def program(source: Path = _SOURCE) -> str:
    """The text that must be equal in all processes: a hash of the code that they run, and the versions of its libraries."""
    digest = hashlib.sha256()
    for file in sorted(file for room in _ROOMS for file in (source / room).rglob("*.py")):
        digest.update(f"{file.relative_to(source)} {file.stat().st_size} ".encode() + file.read_bytes())
    versions = ", ".join(f"{name} {package_version(name)}" for name in _LIBRARIES)
    return f"entente {digest.hexdigest()[:12]}, {versions}"


def interface_of(address: str) -> str:
    """Name of this machine's network interface that has this address; empty if none has it."""
    found = (name for name, each in psutil.net_if_addrs().items() if address in {one.address for one in each})
    return next(found, "")
