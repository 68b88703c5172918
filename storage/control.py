"""The control file of a run, and the status files of its producers.

The training process writes `control.json` whenever something in it changes. Each producer writes `producers/<producer>.json`
every few seconds. A reader always finds a complete file, old or new, and needs no other message.
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
from storage.files import FILES, is_running, make_directory
from storage.program import program_marks
from storage.runs import RunPaths, check_name, durable_write
from telemetry.errors import DataError

BEAT_S = 2.0
"""Seconds between two writes of a producer's status."""
LOST_AFTER_S = 30.0
"""Seconds without a write after which a producer counts as lost. The clocks of the machines may differ by less than that."""
GONE_AFTER_S = 3 * BEAT_S
"""The same for a producer of this machine whose process has ended."""

ProducerState = Literal["opening", "playing", "waiting", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What a run tells its producers."""

    counter: int
    """Grows with every write, also when a run is resumed."""
    version: int
    """Newest policy version; 0 is the base model."""
    adapter: str
    """Adapter folder, relative to the run's folder; empty for the base model."""
    adapter_hash: str
    """Hash of the adapter; 'base' for the base model."""
    oldest: int
    """Oldest version that may still be trained on; producers do not play older ones."""
    quota: int
    """Start groups that a producer may begin with one version; then it waits for the next version."""
    stop: bool
    """True if all producers must end."""
    reason: str
    """Why they must end, in a few words; empty while the run continues."""
    dismissed: tuple[str, ...]
    """Producers that must end although others continue."""
    base_model: str
    """Fingerprint of the model that the run trains."""
    plays: str
    """Hash of the settings that affect the play. A producer with other settings must be started again."""
    gather: bool
    """True while a step's start groups are to spare: producers gather them into large shards. False: they publish at once."""
    program: tuple[str, ...]
    """Marks of the program that trains (storage/program.py). Another program may not play for it."""
    host: str
    pid: int
    """Machine and process that trains."""

    @property
    def policy(self) -> PolicyVersion:
        """Number and hash of the newest version, without the folder."""
        return PolicyVersion(version=self.version, adapter_hash=self.adapter_hash)

    def wants(self, producer: str) -> bool:
        """Whether this producer may continue."""
        return not self.stop and producer not in self.dismissed

    @property
    def abandoned(self) -> bool:
        """Whether the process that trained was killed on this machine. The processes of another one cannot be seen."""
        return not self.stop and self.host == socket.gethostname() and not is_running(self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStatus:
    """What a producer reports about itself."""

    producer: str
    state: ProducerState
    published: int
    """Start groups that it has published, over all its starts."""
    in_flight: int
    """Start groups that it is playing."""
    next_group: int
    """Lower bound of the next start group's number; a number is never used twice."""
    version: int
    """Policy version that it plays with."""
    alive_at: float
    """Unix time of the last write, by its own clock, seconds."""
    began_at: float
    """Unix time of its start, by its own clock, seconds."""
    host: str
    pid: int
    flow_run: str
    """Id of its flow run in Prefect; empty without one."""
    sentence: str
    """Why it waits or has ended; empty while it plays."""

    def lost(self, now: float | None = None) -> bool:
        """Whether it stopped writing without reporting its end.

        Args:
            now: Unix time, seconds; None: the clock.
        """
        silent = (time.time() if now is None else now) - self.alive_at
        if self.state == "ended" or silent <= GONE_AFTER_S:
            return False
        return silent > LOST_AFTER_S or (self.host == socket.gethostname() and not is_running(self.pid))

    def at_work(self, now: float | None = None) -> bool:
        """Whether it has neither ended nor been lost."""
        return self.state != "ended" and not self.lost(now)


def read_control(paths: RunPaths) -> Control:
    """The newest control file.

    Raises:
        DataError: there is no such file, or it is damaged.
    """
    try:
        content = FILES.fetch(paths.control).read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{paths.control} is missing: the run has not begun; begin or resume its training") from error
    return _parsed(Control, content, paths.control, "it is written again when the run trains on")


def read_producer(paths: RunPaths, producer: str) -> ProducerStatus | None:
    """The last status of a producer; None if it never wrote one.

    Raises:
        DataError: the file is damaged.
    """
    path = _status_path(paths, producer)
    try:
        content = FILES.fetch(path).read_bytes()
    except FileNotFoundError:
        return None
    status = _parsed(ProducerStatus, content, path, "remove it")
    if status.producer != producer:
        raise DataError(f"{path} is the status of producer '{status.producer}': it is a copy; remove it")
    return status


def read_producers(paths: RunPaths) -> tuple[list[ProducerStatus], list[str]]:
    """The status of every producer, sorted by name, and one sentence per damaged file."""
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
    """Replace the status of a producer."""
    make_directory(paths.producers)
    durable_write(_status_path(paths, status.producer), json.dumps(asdict(status), indent=1).encode())


class ControlDesk:
    """Writes the control file of a run. Only the training process has one; any of its threads may use it."""

    def __init__(self, paths: RunPaths, *, base_model: str, plays: str, quota: int, max_policy_lag: int) -> None:
        """The first write is in `serve`."""
        self._paths, self._lag = paths, max_policy_lag
        self._lock = threading.Lock()
        self._planned: dict[str, Any] = {}
        self._wrote = False
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
            gather=False,
            program=program_marks(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    @property
    def control(self) -> Control:
        """The content of the last write."""
        return self._control

    def serve(self, policy: PolicyVersion) -> None:
        """Tell producers to play with this version."""
        folder = str(policy.adapter.resolve().relative_to(self._paths.root.resolve())) if policy.adapter else ""
        self._write(
            version=policy.version,
            adapter=folder,
            adapter_hash=policy.adapter_hash,
            oldest=max(0, policy.version - self._lag),
            **self._planned,
        )
        self._planned = {}

    def ask(self, *, quota: int, gather: bool) -> None:
        """Tell producers how much each may begin with this version, and whether they may gather shards."""
        self._planned = {}
        if (quota, gather) != (self._control.quota, self._control.gather):
            self._write(quota=quota, gather=gather)

    def plan(self, *, quota: int, gather: bool) -> None:
        """The same for the next version that is served, with it."""
        self._planned = {"quota": quota, "gather": gather}

    def dismiss(self, producers: Iterable[str]) -> None:
        """Tell these producers to end. Their names are not used again."""
        self._write(dismissed=tuple(sorted({*self._control.dismissed, *producers})))

    def stop(self, reason: str) -> None:
        """Tell all producers to end."""
        self._write(stop=True, reason=reason)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._control = replace(self._control, **changes, counter=self._control.counter + 1)
            content = json.dumps(asdict(self._control), indent=1).encode()
            FILES.replace(self._paths.control, content, sole_writer=self._wrote)
            self._wrote = True


def _counter_of(paths: RunPaths) -> int:
    try:
        return read_control(paths).counter
    except DataError:  # missing, or damaged: then the clock is larger than any number of writes
        return int(time.time()) if FILES.exists(paths.control) else 0


def _status_path(paths: RunPaths, producer: str) -> Path:
    return paths.producers / f"{check_name(producer, 'The producer')}.json"


_T = TypeVar("_T", Control, ProducerStatus)
_KINDS: Mapping[Any, tuple[type, ...]] = {int: (int,), str: (str,), bool: (bool,), float: (int, float), tuple[str, ...]: (list,)}


def _parsed(kind: type[_T], content: bytes, path: Path, cure: str) -> _T:
    """The file's fields, checked for their types, so that a file edited by hand is refused as a whole."""
    try:
        stored = json.loads(content)
        values = {field.name: stored[field.name] for field in fields(kind)}
        for field in fields(kind):
            value, kinds = values[field.name], _KINDS.get(field.type, (str,))
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
                raise TypeError(f"{field.name} is {value!r}")
            values[field.name] = tuple(value) if isinstance(value, list) else value
    except KeyError as error:
        raise DataError(f"{path} was written by another version of the program, without {error}: {cure}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): {cure}") from error
    return kind(**values)
