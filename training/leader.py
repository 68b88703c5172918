"""Brings the processes of a trainer together, in its first process, the leader.

The leader listens at an address (`training.address`; without processes elsewhere at a free port of the loopback). It starts
`training.processes` less one followers on this machine. `training.processes_elsewhere` more join from other machines
(`training.follow`). A process that does not fit is refused with a sentence and takes no place, so it can be replaced by another.

From then on the processes live and die together. If a follower ends, the leader says so in one sentence and ends at once, because
a collective operation would wait for the follower for ever; the run is resumed, and the step is repeated from its ledger. If the
leader ends, its followers on this machine end, and those elsewhere wait for the next leader. Followers do not read the run's
files.
"""

import contextlib
import hmac
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import torch

from decoding.model_files import base_identity
from telemetry.errors import InputError, TrainingError
from telemetry.plain_text import shown
from training.follower import TOKEN_VARIABLE, Wanted
from training.joining import (
    KEY_VARIABLE,
    Hello,
    Line,
    Offer,
    Place,
    as_message,
    interface_of,
    program,
    read_address,
    read_message,
)
from training.parallel import Peers, form_group, open_store
from training.policy import choose_device
from training.settings import TrainingSettings

logger = logging.getLogger("entente.trainer")

JOIN_S = 600.0
"""Seconds within which all followers must have joined."""
_HELLO_S = 30.0
"""Seconds within which a follower must say who it is."""


@dataclass(frozen=True, slots=True, eq=False)
class _Follower:
    hello: Hello
    line: Line
    local: bool

    @property
    def name(self) -> str:
        return f"process {self.hello.local_rank} on {shown(self.hello.host)}"


def gather_followers(
    model: Path, settings: TrainingSettings, run: str, on_loss: Callable[[str], None] | None = None
) -> Peers | None:
    """Start the followers of this machine, wait for those of others, and form their process group; None without followers.

    Args:
        run: name of the run.
        on_loss: called from another thread with a sentence if a follower ends later; must end this process, as the default does.

    Raises:
        InputError: the address cannot be used, there is no key for it, or there are fewer GPUs than processes here.
        TrainingError: not all followers joined in time.
    """
    size = settings.processes + settings.processes_elsewhere
    if size == 1:
        return None
    device = choose_device(settings.device)
    if device.type == "cuda":
        if torch.cuda.device_count() < settings.processes:
            raise InputError(
                f"training.processes is {settings.processes} but torch sees {torch.cuda.device_count()} GPUs here, and each "
                "process needs one of its own: lower it"
            )
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    return _Gathering(model, settings, run, device, on_loss or _end_here).form()


def _end_here(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(1)


class _Gathering:
    """The followers of one leader: those that joined, and the watch over them."""

    def __init__(
        self, model: Path, settings: TrainingSettings, run: str, device: torch.device, on_loss: Callable[[str], None]
    ) -> None:
        self._settings, self._run, self._device, self._on_loss = settings, run, device, on_loss
        self._program, self._secret = program(), secrets.token_hex(16)
        self._offer = Offer(
            run=run,
            model=str(model),
            base=base_identity(model),
            device=device.type,
            threads=torch.get_num_threads(),
            settings=settings.model_dump(mode="json"),
        )
        self._key = os.environ.get(KEY_VARIABLE, "")
        self._listener = _listen(settings, bool(self._key))
        self._host, self._port = self._listener.getsockname()[:2]
        self._changed = threading.Condition()
        self._joined: list[_Follower] = []
        self._complete = False

    def form(self) -> Peers:
        """Gather all followers and form the group."""
        threading.Thread(target=self._accept, name="followers", daemon=True).start()
        for number in range(1, self._settings.processes):
            self._start(number)
        if elsewhere := self._settings.processes_elsewhere:
            logger.warning("the trainer waits for %d processes elsewhere at %s:%d", elsewhere, self._host, self._port)
        wanted = self._settings.processes - 1 + elsewhere
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._joined) == wanted, timeout=JOIN_S):
                raise TrainingError(
                    f"{len(self._joined)} of {wanted} other processes joined the trainer at {self._host}:{self._port} within "
                    f"{JOIN_S:g} s: start the others with `torchrun -m training.follow`, or lower training.processes_elsewhere"
                )
            self._complete = True
            placed = self._in_order()
        server = socket.create_server((self._host, 0), family=self._listener.family)
        port, token = server.getsockname()[1], secrets.token_hex(16)
        store = open_store(self._host, port, token, server)
        for rank, follower in enumerate(placed, start=1):
            with contextlib.suppress(OSError):  # whoever watches the line says so
                follower.line.send(as_message(Place(rank=rank, size=wanted + 1, port=port, token=token)))
        return form_group(
            store,
            rank=0,
            size=wanted + 1,
            device=self._device,
            interface=interface_of(self._host),
            base_parts=self._settings.base_parts,
        )

    def _in_order(self) -> list[_Follower]:
        """The followers by rank: those of this machine first, then machine by machine as they came."""
        hosts = list(dict.fromkeys(each.hello.host for each in self._joined if not each.local))
        return sorted(self._joined, key=lambda each: (-1 if each.local else hosts.index(each.hello.host), each.hello.local_rank))

    def _start(self, number: int) -> None:
        """Start follower `number` of this machine, and watch its process."""
        wanted = Wanted(address=f"{self._host}:{self._port}", local_rank=number, parent=os.getpid())
        follower = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.follower", wanted.to_json()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {TOKEN_VARIABLE: self._secret},
        )

        def watch() -> None:
            code = follower.wait()
            self._lost(f"process {number} on this machine", f"ended with exit code {code}")

        threading.Thread(target=watch, name=f"follower-{number}", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(connection,), name="follower", daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        """Let a follower join if it fits, and watch it from then on."""
        with connection, contextlib.closing(Line(connection)) as line:
            try:
                follower = self._meet(line)
            except (OSError, ValueError, TypeError) as error:  # TypeError: a key that is not ASCII
                logger.warning("a connection to the trainer's address ended before it had joined: %s", error)
                return
            if follower is not None:
                self._watch(follower)

    def _meet(self, line: Line) -> _Follower | None:
        """Learn who wants to join; None if it cannot, or has left."""
        hello = read_message(Hello, line.receive(_HELLO_S))
        follower = _Follower(hello, line, hmac.compare_digest(hello.started_by, self._secret))
        if reason := self._refusal(follower):
            line.send({"refused": reason})
            logger.warning("%s was refused: %s", follower.name, reason)
            return None
        line.send(as_message(self._offer))
        if words := line.receive().get("failed"):
            logger.warning("%s did not join: %s", follower.name, shown(str(words)))
            return None
        with self._changed:
            if self._complete or not self._has_room(follower):
                return None  # another was faster; this one asks again, and is refused with a sentence
            self._joined.append(follower)
            self._changed.notify_all()
        return follower

    def _watch(self, follower: _Follower) -> None:
        """Wait for the end of a follower that joined."""
        words = shown(follower.line.last_words())
        with self._changed:
            if not self._complete:
                self._joined.remove(follower)
                logger.warning("%s left before all had joined%s", follower.name, words and f": {words}")
                return
        if words or not follower.local:  # the end of a process on this machine is told with its exit code
            self._lost(follower.name, f"failed: {words}" if words else "ended or cannot be reached")

    def _refusal(self, follower: _Follower) -> str:
        """Why a follower cannot join, in one sentence; empty if it can."""
        hello = follower.hello
        if not follower.local and self._key and not hmac.compare_digest(hello.key, self._key):
            return f"the trainer at {self._host}:{self._port} wants another key: set {KEY_VARIABLE} to the trainer's"
        if hello.program != self._program:
            return f"this program is '{hello.program}', but the trainer's is '{self._program}': install the same here as there"
        if hello.run not in ("", self._run):
            return f"the trainer at {self._host}:{self._port} trains run '{self._run}', not '{hello.run}': give its own address"
        with self._changed:
            if self._complete or not self._has_room(follower):
                return (
                    f"run '{self._run}' already has the {self._settings.processes_elsewhere} processes elsewhere that "
                    "training.processes_elsewhere asks for: start fewer, or raise it"
                )
        return ""

    def _has_room(self, follower: _Follower) -> bool:
        room = self._settings.processes - 1 if follower.local else self._settings.processes_elsewhere
        return sum(each.local == follower.local for each in self._joined) < room

    def _lost(self, name: str, what: str) -> None:
        """Say that a follower was lost, and end."""
        self._on_loss(
            f"the trainer ends, because one of its {self._settings.processes + self._settings.processes_elsewhere} processes, "
            f"{name}, {what}: resume the run, which repeats the step"
        )


def _listen(settings: TrainingSettings, has_key: bool) -> socket.socket:
    """The socket at which followers join.

    Raises:
        InputError: the address is taken or not of this machine, or it is no loopback address and there is no key.
    """
    if not settings.address:
        return socket.create_server(("127.0.0.1", 0))
    host, port = read_address(settings.address)
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise InputError(
            f"training.address {settings.address} cannot be listened on ({error.strerror or error}): give an address of this "
            "machine by which the others reach it, and a free port"
        ) from error
    found = ip_address(listener.getsockname()[0].partition("%")[0])
    if found.is_unspecified or not (found.is_loopback or has_key):
        listener.close()
        if found.is_unspecified:
            raise InputError(f"training.address {settings.address} is every address of this machine: give one of them")
        raise InputError(
            f"training.address {settings.address} is reached over the network: set {KEY_VARIABLE} here and where followers are"
        )
    return listener
