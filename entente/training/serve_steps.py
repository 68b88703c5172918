"""Main module of a trainer process: answers JSON lines on its standard input, a socket, until the flow closes it.

    python -m entente.training.serve_steps                                     one process
    torchrun --nproc-per-node 2 -m entente.training.serve_steps                several; the one of rank 0 answers

Rank 0 alone selects rows and writes ledgers, checkpoints and adapters. The others compute shares of its updates
(`entente/training/parallel.py`), and get everything that they need from it, so they read nothing but the base model.
"""

import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from entente.telemetry.child import end_with_parent
from entente.telemetry.errors import EntenteError, InputError, TrainingError, disk_full
from entente.telemetry.memory import GIVE_BACK_STEPS, give_back_memory, keep_freed_memory
from entente.training.parallel import Peers, follow
from entente.training.policy import Policy, choose_device
from entente.training.settings import TrainingSettings
from entente.training.trainer import Trainer
from entente.training.update import Updater
from storage.files import held
from storage.lesson_shelf import LessonQuery
from storage.retention import RetentionSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings

_FORMER_TRAINER_S = 20.0
"""Seconds to wait for the run's lock. A trainer whose parent was killed ends within a second, on a busy machine later."""
_TORCHRUN_ENDS_S = 10.0
"""Seconds to wait after an unexpected failure among several processes: if another one ended, torchrun ends this one before, and
the flow is told of the first failure instead of its consequence here."""


def main() -> None:
    """Serve the flow in the process of rank 0, and follow it in the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The run's files are safe against a kill, so the process may end at any time with its parent, and with the flow.
    end_with_parent()
    if os.environ.get("GROUP_RANK", "0") == "0":  # torchrun's number of this machine: the flow is on the first
        threading.Thread(target=_end_with_flow, name="flow-watch", daemon=True).start()
    keep_freed_memory()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    peers = Peers.join()
    if peers is None or peers.leads:
        _serve(socket.socket(fileno=0), peers)
    else:
        _follow(peers)


def _end_with_flow() -> None:
    """End this process when the flow closes its end of the socket."""
    watch = select.poll()
    watch.register(0, 0)  # only a hang-up is reported
    while not any(event & select.POLLHUP for _, event in watch.poll()):
        pass
    os._exit(0)


def _serve(connection: socket.socket, peers: Peers | None) -> None:
    """Answer the flow. An `EntenteError` is answered with its sentence. Any other exception is logged and answered, and ends the
    process with exit code 1. So does any error if there are other processes, which may wait for the rest of a work.
    """
    stream = connection.makefile("rw", encoding="utf-8")
    trainer, lock = None, ExitStack()
    for line in stream:
        message = json.loads(line)
        ends = False
        try:
            if message["op"] == "open":
                trainer = _open(message, lock, peers)
                answer: dict[str, Any] = trainer.resume_point().to_json()
            else:
                assert trainer is not None, "the first message must be 'open'"
                answer = _answer(trainer, message)
        except EntenteError as error:
            ends = peers is not None
            answer = {"error": type(error).__name__, "sentence": str(error)}
        except Exception as error:
            ends = True
            traceback.print_exc()
            if peers is not None:
                time.sleep(_TORCHRUN_ENDS_S)
            known = disk_full(error) or TrainingError(f"the trainer failed unexpectedly: {type(error).__name__}: {error}")
            answer = {"error": type(known).__name__, "sentence": str(known)}
        try:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
        except BrokenPipeError:
            return
        if ends:
            sys.exit(1)
        if message["op"] in ("open", "mismatch") or message.get("step", 1) % GIVE_BACK_STEPS == 0:
            give_back_memory()


def _open(message: dict[str, Any], lock: ExitStack, peers: Peers | None = None) -> Trainer:
    paths = RunPaths(Path(message["run"]))
    # After a kill, the former trainer may still need a moment to end.
    if not lock.enter_context(held(paths.trainer_lock, wait_s=_FORMER_TRAINER_S)):
        raise InputError(f"another trainer works on run '{paths.root.name}': wait for it, or stop it")
    if peers is not None:
        peers.broadcast(message)
    storage = StorageSettings.model_validate(message["storage"])
    policy, training = _load(message, peers)
    return Trainer(paths, policy, training, storage, peers=peers)


def _follow(peers: Peers) -> None:
    """Compute shares of the updates of rank 0 until it ends."""
    policy, training = _load(peers.broadcast(), peers)
    follow(peers, policy.parameters(), Updater(policy, training, peers).compute)
    os._exit(0)  # the group has ended, so nothing can be said to it any more


def _load(message: dict[str, Any], peers: Peers | None) -> tuple[Policy, TrainingSettings]:
    """The policy of a run, on the GPU of this process if there are several."""
    training = TrainingSettings.model_validate(message["training"])
    if peers is not None and choose_device(training.device).type == "cuda":
        if torch.cuda.device_count() <= peers.local_rank:
            raise InputError(
                f"training.processes is {training.processes} but torch sees {torch.cuda.device_count()} GPUs here, and each "
                "process needs one of its own: lower it"
            )
        torch.cuda.set_device(peers.local_rank)
    return Policy(Path(message["model"]), training, split_base=peers is not None and training.split_base), training


def _answer(trainer: Trainer, message: dict[str, Any]) -> dict[str, Any]:
    if message["op"] == "mismatch":
        return {"metrics": trainer.measure_mismatch(message["engine"]).metrics()}
    if message["op"] == "retire":
        return {"freed": trainer.retire(RetentionSettings.model_validate(message["settings"]))}
    if message["op"] == "eligible":
        return asdict(trainer.eligible(message["step"], message["start_groups"]))
    if message["op"] == "fresh_rows":
        return {"rows": trainer.fresh_rows()}
    lessons = LessonQuery(**message["lessons"]) if message["lessons"] else None
    if message["op"] == "lessons_left":
        assert lessons is not None, "a round must be named"
        return {"left": trainer.lessons_left(lessons)}
    return trainer.step(message["step"], message["start_groups"], lessons).to_json()


if __name__ == "__main__":
    main()
