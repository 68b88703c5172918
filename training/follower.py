"""A follower of a trainer, and its main module: computes shares of updates for a leader (`training.leader`).

    python -m training.follower WANTED        one follower; WANTED is a `Wanted` as JSON

It waits until there is a leader at the address, joins it, and ends with it. The exit code is 0 if the leader ended, 2 if the two
do not fit together, else 1; each comes with one sentence. `training.follow` starts it again for the next leader.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from decoding.model_files import base_identity, resolve_model
from telemetry.errors import EntenteError, InputError
from telemetry.parent import end_with_parent
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

TOKEN_VARIABLE = "ENTENTE_FOLLOWER_TOKEN"
"""Environment variable by which a leader knows the followers that it started."""
_ANSWER_S = 60.0
"""Seconds within which a leader answers who joins."""
_AGAIN_S = 1.0
_LEADER_IS_SEEN_S = 10.0
"""Seconds to wait after a collective operation failed: if the leader ended, its connection says so before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a follower was asked to join."""

    address: str
    """Of the leader."""
    model: str = ""
    """Folder or hub id of the base model here; empty: the leader's folder."""
    run: str = ""
    """The run that it must be; empty: any."""
    local_rank: int = 0
    parent: int = 0
    """Process id of the process with which this one ends."""

    def to_json(self) -> str:
        """As text for the command line."""
        return json.dumps(asdict(self))


def main(wanted: Wanted) -> NoReturn:
    """Follow one leader until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent, which is told too, decides
    end_with_parent(parent=wanted.parent)
    local = TOKEN_VARIABLE in os.environ

    def say(sentence: str) -> None:
        if not local:
            sys.stdout.write(f"{sentence}\n")
            sys.stdout.flush()

    try:
        line = _connect(wanted.address, say)
        offer = _ask(line, wanted)
        model = _find_base(line, wanted, offer)
        place = _place(line, offer)
    except _LeaderEnded as ended:
        say(str(ended))
        os._exit(0)
    except EntenteError as error:
        sys.stderr.write(f"entente: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    say(f"joined run '{offer.run}' at {wanted.address} as process {place.rank} of {place.size}")

    def end_with_leader() -> None:
        line.last_words()
        say(f"the trainer of run '{offer.run}' at {wanted.address} has ended")
        os._exit(0)

    threading.Thread(target=end_with_leader, name="leader", daemon=True).start()
    try:
        _work(line, wanted, offer, place, model)
    except Exception as error:
        known = isinstance(error, EntenteError)
        if not known:
            time.sleep(_LEADER_IS_SEEN_S)
            traceback.print_exc()
        sentence = str(error) if known else f"{type(error).__name__}: {' '.join(str(error).split())}"
        sys.stderr.write(f"entente: {sentence}\n")
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            line.send({"failed": sentence})
        os._exit(error.exit_code if known else 1)
    os._exit(0)


class _LeaderEnded(Exception):
    """The leader ended before the follower had its place."""


def _connect(address: str, say: Any) -> Line:
    """The connection to the leader; waits until there is one."""
    host, port = read_address(address)
    waits = False
    while True:
        try:
            return Line(socket.create_connection((host, port), timeout=_ANSWER_S))
        except OSError as error:
            if not waits:
                say(f"waits for a trainer at {address} ({error.strerror or error})")
            waits = True
            time.sleep(_AGAIN_S)


def _ask(line: Line, wanted: Wanted) -> Offer:
    """Say who this is; returns what the leader trains.

    Raises:
        InputError: the leader refuses, or what answers is none.
    """
    hello = Hello(
        program=program(),
        host=socket.gethostname(),
        local_rank=wanted.local_rank,
        run=wanted.run,
        key=os.environ.get(KEY_VARIABLE, ""),
        started_by=os.environ.get(TOKEN_VARIABLE, ""),
    )
    try:
        line.send(as_message(hello))
        answer = line.receive(_ANSWER_S)
    except ConnectionError as error:
        raise _LeaderEnded(f"the trainer at {wanted.address} ended before this process had joined") from error
    except (OSError, ValueError) as error:
        raise InputError(f"what answers at {wanted.address} is no trainer of this program: give training.address") from error
    if "refused" in answer:
        raise InputError(str(answer["refused"]))
    try:
        return read_message(Offer, answer)
    except ValueError as error:
        raise InputError(f"what answers at {wanted.address} is no trainer of this program: give training.address") from error


def _find_base(line: Line, wanted: Wanted, offer: Offer) -> Path:
    """Find the leader's base model here, and say so; returns its folder.

    Raises:
        InputError: it is not here, or another model is in its place.
    """
    try:
        if not wanted.model and not Path(offer.model).is_dir():
            raise InputError(
                f"the base model '{offer.model}' of run '{offer.run}' is not on this machine: copy it here, and name its folder "
                "with --model"
            )
        found = resolve_model(wanted.model or offer.model)
        if (identity := base_identity(found)) != offer.base:
            raise InputError(
                f"run '{offer.run}' trains the base model {offer.base}, but '{found}' is {identity} here: copy the same model to "
                "this machine, and name its folder with --model"
            )
    except InputError as error:
        with contextlib.suppress(OSError):
            line.send({"failed": str(error)})
        raise
    with contextlib.suppress(OSError):  # then the next read says that the leader has ended
        line.send({"ready": True})
    return found


def _place(line: Line, offer: Offer) -> Place:
    """Wait until all processes are ready; returns the place of this one."""
    try:
        return read_message(Place, line.receive())
    except (OSError, ValueError) as error:
        raise _LeaderEnded(f"the trainer of run '{offer.run}' ended before all its processes had joined") from error


def _work(line: Line, wanted: Wanted, offer: Offer, place: Place, model: Path) -> None:
    """Compute shares of updates until the leader ends."""
    import torch

    from training.parallel import follow, form_group, open_store
    from training.policy import Policy, choose_device
    from training.settings import TrainingSettings
    from training.update import Updater

    torch.set_num_threads(offer.threads)
    settings = TrainingSettings.model_validate({**offer.settings, "device": offer.device})
    device = choose_device(settings.device)
    if device.type == "cuda":
        if wanted.local_rank >= torch.cuda.device_count():
            raise InputError(
                f"process {wanted.local_rank} of this machine has no GPU of its own: torch sees {torch.cuda.device_count()} here"
            )
        torch.cuda.set_device(wanted.local_rank)
        device = torch.device("cuda", wanted.local_rank)
    host, _ = read_address(wanted.address)
    peers = form_group(
        open_store(host, place.port, place.token),
        rank=place.rank,
        size=place.size,
        device=device,
        interface=interface_of(line.own_address),
        base_parts=settings.base_parts,
    )
    policy = Policy(model, settings, peers.base_parts)
    follow(peers, policy.parameters(), Updater(policy, settings, peers).compute)


if __name__ == "__main__":
    main(Wanted(**json.loads(sys.argv[1])))
