"""What a run tells those who play for it elsewhere, and what they tell of themselves: small files, and nothing but files.

`control.json` is written by the process that trains, whenever something in it changes; `producers/<producer>.json` by each
producer on a beat. Promise: either is whole whenever it is read, the one before or the one after; a reader needs no other word.
Never: count rows (the index does), or decide anything.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from records.policy_version import BASE, PolicyVersion
from storage.files import FILES, make_directory
from storage.runs import RunPaths, check_name, durable_write
from telemetry.errors import DataError

BEAT_S = 2.0
"""Seconds between two writings of a producer's status."""
LOST_AFTER_S = 30.0
"""Seconds without a beat after which a producer counts as lost; clocks of machines may differ by less than that."""
GONE_AFTER_S = 3 * BEAT_S
"""The same for one whose process is gone from this very machine."""

ProducerState = Literal["opening", "playing", "waiting", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What a run tells its producers."""

    counter: int
    """Grows with every writing, over resumed runs too."""
    version: int
    """Newest policy version; 0 is the base model."""
    adapter: str
    """Its folder, relative to the run's; empty for the base model."""
    adapter_hash: str
    """Its hash, 'base' for the base model."""
    oldest: int
    """Oldest version that may still be trained on; what an older one would draw is not worth playing."""
    quota: int
    """Start groups that a producer may begin under one version; then it waits for the next."""
    stop: bool
    """No producer is to play on."""
    reason: str
    """Why, in a few words; empty while it goes on."""
    dismissed: tuple[str, ...]
    """Producers that are to end, though others go on."""
    base_model: str
    """Fingerprint of the model that the run trains."""
    plays: str
    """Hash of the settings that shape what is played; a producer under others must be opened again."""

    @property
    def policy(self) -> PolicyVersion:
        """The newest version by number and hash; its folder is in `adapter`, relative to the run's."""
        return PolicyVersion(version=self.version, adapter_hash=self.adapter_hash)

    def wants(self, producer: str) -> bool:
        """May this producer play on?"""
        return not self.stop and producer not in self.dismissed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatus:
    """What a producer tells of itself."""

    producer: str
    state: ProducerState
    published: int
    """Start groups that it published, over all its lives."""
    in_flight: int
    """Start groups that it plays now."""
    next_group: int
    """The number that its next start group will bear, at least: a number is never used twice."""
    version: int
    """Policy version that it plays."""
    alive_at: float
    """Its own clock at the last beat, seconds of 1970."""
    began_at: float
    """The same, at its start."""
    host: str
    pid: int
    flow_run: str
    """Id of its flow run in Prefect; empty without one."""
    sentence: str
    """Why it waits or ended; empty while it plays."""

    def lost(self, now: float | None = None) -> bool:
        """Has it ended without a word?"""
        silent = (time.time() if now is None else now) - self.alive_at
        if self.state == "ended" or silent <= GONE_AFTER_S:
            return False
        return silent > LOST_AFTER_S or (self.host == socket.gethostname() and not _is_process(self.pid))

    def at_work(self, now: float | None = None) -> bool:
        """Neither ended nor lost."""
        return self.state != "ended" and not self.lost(now)


def read_control(paths: RunPaths) -> Control:
    """What the run tells its producers now.

    Raises:
        DataError: there is no such file, or it is damaged.
    """
    try:
        content = paths.control.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"{paths.control} is missing: the run was never at work, or under an older version; begin or resume its training"
        ) from error
    return _parsed(Control, content, paths.control, "it is written again when the run trains on")


def read_producer(paths: RunPaths, producer: str) -> ProducerStatus | None:
    """What a producer last told of itself; None if it never did.

    Raises:
        DataError: the file is damaged.
    """
    path = _status_path(paths, producer)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    status = _parsed(ProducerStatus, content, path, "remove it")
    if status.producer != producer:
        raise DataError(f"{path} is the status of producer '{status.producer}': it is a copy; remove it")
    return status


def read_producers(paths: RunPaths) -> tuple[list[ProducerStatus], list[str]]:
    """All producers that ever told of themselves, by name, and a sentence about each file that is damaged."""
    found, damaged = [], []
    for name in sorted(FILES.names(paths.producers)):
        if not name.endswith(".json"):
            continue
        try:
            status = read_producer(paths, name.removesuffix(".json"))
        except DataError as error:
            damaged.append(str(error))
        else:
            found += [] if status is None else [status]
    return found, damaged


def write_producer(paths: RunPaths, status: ProducerStatus) -> None:
    """Replace what a producer tells of itself."""
    make_directory(paths.producers)
    durable_write(_status_path(paths, status.producer), json.dumps(asdict(status), indent=1).encode())


class ControlDesk:
    """Writes a run's control file; only the process that trains has one, and any of its threads may use it."""

    def __init__(self, paths: RunPaths, *, base_model: str, plays: str, quota: int, max_policy_lag: int) -> None:
        """Nothing is written before `serve`."""
        self._paths, self._lag = paths, max_policy_lag
        self._lock = threading.Lock()
        self._control = Control(
            counter=_counter_of(paths),
            version=BASE.version,
            adapter="",
            adapter_hash=BASE.adapter_hash,
            oldest=0,
            quota=quota,
            stop=False,
            reason="",
            dismissed=(),
            base_model=base_model,
            plays=plays,
        )

    @property
    def control(self) -> Control:
        """As last written."""
        return self._control

    def serve(self, policy: PolicyVersion) -> None:
        """Have producers play this version."""
        folder = str(policy.adapter.resolve().relative_to(self._paths.root.resolve())) if policy.adapter else ""
        self._write(
            version=policy.version,
            adapter=folder,
            adapter_hash=policy.adapter_hash,
            oldest=max(0, policy.version - self._lag),
        )

    def dismiss(self, producers: Iterable[str]) -> None:
        """Tell these producers to end; their names are not used again."""
        self._write(dismissed=tuple(sorted({*self._control.dismissed, *producers})))

    def stop(self, reason: str) -> None:
        """Tell all producers to end."""
        self._write(stop=True, reason=reason)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._control = replace(self._control, **changes, counter=self._control.counter + 1)
            durable_write(self._paths.control, json.dumps(asdict(self._control), indent=1).encode())


def _counter_of(paths: RunPaths) -> int:
    try:
        return read_control(paths).counter
    except DataError:  # none yet; or damaged, and then the clock is beyond any count of writings
        return int(time.time()) if paths.control.exists() else 0


def _status_path(paths: RunPaths, producer: str) -> Path:
    return paths.producers / f"{check_name(producer, 'The producer')}.json"


_T = TypeVar("_T", Control, ProducerStatus)
_KINDS: Mapping[Any, tuple[type, ...]] = {int: (int,), str: (str,), bool: (bool,), float: (int, float), tuple[str, ...]: (list,)}


def _parsed(kind: type[_T], content: bytes, path: Path, cure: str) -> _T:
    """The file's fields, each of its type: a file that was altered by hand is said to be, and never half believed."""
    try:
        told = json.loads(content)
        values = {field.name: told[field.name] for field in fields(kind)}
        for field in fields(kind):
            value, kinds = values[field.name], _KINDS.get(field.type, (str,))
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
                raise TypeError(f"{field.name} is {value!r}")
            values[field.name] = tuple(value) if isinstance(value, list) else value
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): {cure}") from error
    return kind(**values)


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
