"""A lease: the lock of a run that lies in an object store, as one small object with an owner and a heartbeat.

A lease is taken by creating the object, and renewed every `BEAT_S` by replacing the object that this holder wrote last. Another
process may take it over when it saw no renewal for `LOST_S`, measured by its own monotonic clock: no two clocks are compared. A
holder that was suspended for longer finds another's object at its next renewal, and `lost` says so. The ledger stays the fence
for what was in flight at that moment: its files are created once.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from storage.files import is_running, machine
from storage.objects import Objects
from telemetry.errors import EntenteError
from telemetry.progress import reporter

BEAT_S = 5.0
"""Seconds between two renewals."""
LOST_S = 20.0
"""Seconds without a renewal after which a lease may be taken over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The content of the object."""

    owner: str
    """Identifies the holder; empty if the lease was given back."""
    machine: str
    """See `files.machine`."""
    pid: int
    beat: int
    """Grows with every renewal."""

    @property
    def has_ended(self) -> bool:
        """Whether it gave the lease back, or was a process of this machine that no longer runs."""
        return not self.owner or (self.machine == machine() and not is_running(self.pid))


class Lease:
    """A lease that this process holds; made by `take`."""

    def __init__(self, objects: Objects, key: str, holder: Holder, etag: str, on_lost: Callable[[str], None]) -> None:
        self._objects, self._key, self._holder, self._etag = objects, key, holder, etag
        self._on_lost = on_lost
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, objects: Objects, key: str, *, wait_s: float = 0.0, on_lost: Callable[[str], None]) -> "Lease | None":
        """Take the lease of this key; None if another process holds it.

        A holder that gives no sign of life is watched for `LOST_S`. One that does is waited for, for `wait_s` in all.

        Args:
            on_lost: called with a sentence, in another thread, when another process has taken the lease over.
        """
        mine = Holder(owner=secrets.token_hex(8), machine=machine(), pid=os.getpid(), beat=0)
        began = silent_since = time.monotonic()
        seen, said = "", False
        while True:
            if (etag := objects.create(key, _packed(mine))) is not None:
                return cls(objects, key, mine, etag, on_lost)
            try:
                content, meta = objects.read(key) or (b"", None)
            except FileNotFoundError:
                continue  # removed meanwhile
            assert meta is not None, "the object is read whole"
            now, other = time.monotonic(), _unpacked(content)
            if meta.etag != seen:
                if seen and now - began >= wait_s:
                    return None  # it lives
                seen, silent_since = meta.etag, now
            if other.has_ended or now - silent_since >= LOST_S:
                if (etag := objects.update(key, _packed(mine), meta.etag)) is not None:
                    return cls(objects, key, mine, etag, on_lost)
                continue
            if not said and now - began > 2 * BEAT_S:
                said = True
                where = other.machine.partition(" ")[0]
                reporter().say(f"process {other.pid} of {where} held the run and is silent; waiting {LOST_S:.0f} s for it")
            time.sleep(min(0.5, BEAT_S / 4))

    def give_back(self) -> None:
        """End the renewals, and mark the lease as free."""
        self._ended.set()
        self._thread.join()
        free = Holder(owner="", machine=self._holder.machine, pid=self._holder.pid, beat=self._holder.beat + 1)
        try:
            self._objects.update(self._key, _packed(free), self._etag)
        except EntenteError as error:  # it runs out by itself
            reporter().say(f"the lock of the run could not be given back, and runs out in {LOST_S:.0f} s: {error}")

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_S):
            next_beat = Holder(
                owner=self._holder.owner, machine=self._holder.machine, pid=self._holder.pid, beat=self._holder.beat + 1
            )
            try:
                etag = self._objects.update(self._key, _packed(next_beat), self._etag)
            except EntenteError as error:
                reporter().say(f"the lock of the run could not be renewed: {error}")
                continue
            if etag is None:
                self._on_lost(self._sentence())
                return
            self._holder, self._etag = next_beat, etag

    def _sentence(self) -> str:
        try:
            content, _ = self._objects.read(self._key) or (b"", None)
            other = _unpacked(content)
            who = f"process {other.pid} of {other.machine.partition(' ')[0]}"
        except (FileNotFoundError, EntenteError):
            who = "another process"
        return f"this process was silent for too long, and {who} works on the run now: it stops, and writes nothing more"


def is_alive(objects: Objects, key: str) -> bool:
    """Whether a lease seems to be held: its object names an owner that has not ended, and was renewed lately.

    For display only, because it compares this machine's clock with the store's.
    """
    try:
        found = objects.read(key)
    except FileNotFoundError:
        return False
    assert found is not None, "the object is read whole"
    content, meta = found
    return not _unpacked(content).has_ended and time.time() - meta.written_ns / 1e9 < 2 * LOST_S


def _packed(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _unpacked(content: bytes) -> Holder:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):  # no lease of this version: as if its holder were silent
        return Holder(owner="unknown", machine="an unknown machine", pid=0, beat=0)
