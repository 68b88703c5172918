"""Messages between a flow and its game processes, and their frames on a socket.

Both ends run the same program, and their socket has no name, so a frame is a pickle behind its length. A message is sent whole or
not at all: what a killed process has written in part is dropped.
"""

import asyncio
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from decoding.legal_table import LegalTable
from records.generation import Generation, GenerationRequest
from rollouts.roll_out import RolledOut, StartGroup
from rollouts.settings import RolloutSettings
from telemetry import errors
from telemetry.errors import EntenteError

TABLE_SLOTS = 256
"""Legal tables that a game process and the flow both keep, so that forks of a position send their table once."""
_LENGTH = struct.Struct("<Q")


# -- to a game process -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GamesToPlay:
    """Start groups to play, in whole families."""

    job: int
    """Number of this work, unique in the flow's process."""
    groups: Sequence[StartGroup]
    settings: RolloutSettings
    producer: str
    seed: int
    """The run's seed."""
    versions: Mapping[str, int | None]
    """Seat -> policy version of the opponents that are versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopGames:
    """Stop a job; nothing is awaited from it."""

    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The completion of a request, or why there is none."""

    job: int
    seat: str
    request_id: str
    generation: Generation | None
    error: tuple[str, str] = ("", "")
    """See `error_fields`."""


# -- from a game process -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GamesReady:
    """The tokenizer is loaded. The first message of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A `GenerationRequest`, whose table is named by its slot."""

    job: int
    seat: str
    """Empty: the policy. Otherwise the seat of another version."""
    request_id: str
    prompt_ids: Sequence[int]
    slot: int
    """Place of the table among the `TABLE_SLOTS` that both ends keep."""
    table: LegalTable | None
    """The table to put into the slot; None: it is there."""
    draw_seed: int
    temperature: float
    snapshot_id: str
    version: int | None

    def request(self, table: LegalTable) -> GenerationRequest:
        """The request, with its table."""
        return GenerationRequest(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            table=table,
            seed=self.draw_seed,
            temperature=self.temperature,
            snapshot_id=self.snapshot_id,
            version=self.version,
        )


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests that became ready together."""

    asked: Sequence[Asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """All forks of a start group have ended."""

    job: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GamesEnded:
    """A job has ended, with its rows or with an error."""

    job: int
    played: RolledOut | None
    error: tuple[str, str] = ("", "")
    """See `error_fields`."""


class SentTables:
    """The tables that a game process has sent, by slot. The oldest slot is used again."""

    def __init__(self) -> None:
        self._slots: list[LegalTable | None] = [None] * TABLE_SLOTS
        self._known: dict[int, int] = {}
        """Identity of a table in a slot -> its slot."""
        self._next = 0

    def place(self, table: LegalTable) -> tuple[int, LegalTable | None]:
        """Slot of `table`, and the table itself if the other end does not have it there."""
        slot = self._known.get(id(table))
        if slot is not None:
            return slot, None
        slot, self._next = self._next, (self._next + 1) % TABLE_SLOTS
        replaced = self._slots[slot]
        if replaced is not None:
            del self._known[id(replaced)]
        self._slots[slot] = table
        self._known[id(table)] = slot
        return slot, table


def error_fields(error: Exception) -> tuple[str, str]:
    """Name of an error's class in `telemetry.errors`, and its sentence. Any other error becomes an `EntenteError`."""
    if isinstance(error, EntenteError):
        return type(error).__name__, str(error)
    return EntenteError.__name__, f"a game process failed unexpectedly: {type(error).__name__}: {error}"


def error_of(fields: tuple[str, str]) -> EntenteError:
    """The inverse of `error_fields`."""
    kind, sentence = fields
    return getattr(errors, kind, EntenteError)(sentence)


class Frames(asyncio.Protocol):
    """Sends and receives messages over a socket. A frame that cannot be read closes it."""

    def __init__(self, on_message: Callable[[Any], None]) -> None:
        """`on_message` is called with each message, in order."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the socket is closed, by either end."""
        self._on_message = on_message
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received += data
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = pickle.loads(self._received[_LENGTH.size : end])
            del self._received[:end]
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self.ended.done():
            self.ended.set_result(None)

    def send(self, message: Any) -> None:
        """Send a message; nothing happens if the socket is closed."""
        if self._transport is not None and not self._transport.is_closing():
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Send what is left, then close the socket."""
        if self._transport is not None:
            self._transport.close()
