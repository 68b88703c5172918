"""Main module of the trainer process: answers JSON lines on an inherited socket until the parent closes it.

python -m training.serve_steps FD
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from storage.files import held
from storage.lesson_shelf import LessonQuery
from storage.retention import RetentionSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import EntenteError, InputError, TrainingError, disk_full
from telemetry.memory import GIVE_BACK_STEPS, give_back_memory, keep_freed_memory
from telemetry.parent import end_with_parent
from training.leader import gather_followers
from training.mismatch import mismatch_metrics
from training.parallel import OutOfStep
from training.policy import Policy
from training.settings import TrainingSettings
from training.trainer import Trainer

_FORMER_TRAINER_S = 20.0
"""Seconds to wait for the run's lock. A trainer whose parent was killed ends within a second, on a busy machine later."""
_FOLLOWER_IS_MISSED_S = 10.0
"""Seconds to wait after an unexpected failure with followers: if one of them ended, its connection says so before."""


def main(descriptor: int) -> None:
    """Serve one parent. An `EntenteError` is answered with its sentence. Any other exception is logged and answered, and ends the
    process with exit code 1, as does the end of a follower.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The run's files are safe against a kill, so the process may end at any time with its parent.
    end_with_parent()
    keep_freed_memory()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    connection = socket.socket(fileno=descriptor)
    stream = connection.makefile("rw", encoding="utf-8")
    writing = threading.Lock()

    def end_with_follower(sentence: str) -> None:
        """Answer with this sentence, now or to the next request, and end."""
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()
        with writing:  # never released: nothing may follow
            with suppress(OSError):  # the parent may have ended too
                connection.sendall(json.dumps({"error": TrainingError.__name__, "sentence": sentence}).encode() + b"\n")
            os._exit(1)

    trainer, followed = None, False
    lock = ExitStack()
    for line in stream:
        message = json.loads(line)
        unexpected = False
        try:
            if message["op"] == "open":
                followed = message["training"]["processes"] + message["training"]["processes_elsewhere"] > 1
                trainer = _open(message, lock, end_with_follower)
                answer: dict[str, Any] = trainer.resume_point().to_json()
            else:
                assert trainer is not None, "the first message must be 'open'"
                answer = _answer(trainer, message)
        except EntenteError as error:
            unexpected = isinstance(error, OutOfStep)
            kind = TrainingError if unexpected else type(error)
            answer = {"error": kind.__name__, "sentence": str(error)}
        except Exception as error:
            traceback.print_exc()
            if followed:
                time.sleep(_FOLLOWER_IS_MISSED_S)
            unexpected = True
            known = disk_full(error) or TrainingError(f"the trainer failed unexpectedly: {type(error).__name__}: {error}")
            answer = {"error": type(known).__name__, "sentence": str(known)}
        try:
            with writing:
                stream.write(json.dumps(answer) + "\n")
                stream.flush()
        except BrokenPipeError:
            return
        if unexpected:
            sys.exit(1)
        if message["op"] in ("open", "mismatch") or message.get("step", 1) % GIVE_BACK_STEPS == 0:
            give_back_memory()


def _open(message: dict[str, Any], lock: ExitStack, on_loss: Callable[[str], None] | None = None) -> Trainer:
    paths = RunPaths(Path(message["run"]))
    # After a kill, the former trainer may still need a moment to end.
    if not lock.enter_context(held(paths.trainer_lock, wait_s=_FORMER_TRAINER_S)):
        raise InputError(f"another trainer works on run '{paths.root.name}': wait for it, or stop it")
    training = TrainingSettings.model_validate(message["training"])
    storage = StorageSettings.model_validate(message["storage"])
    model = Path(message["model"])
    peers = gather_followers(model, training, paths.root.name, on_loss)
    policy = Policy(model, training, peers and peers.base_parts)
    return Trainer(paths, policy, training, storage, peers=peers)


def _answer(trainer: Trainer, message: dict[str, Any]) -> dict[str, Any]:
    if message["op"] == "mismatch":
        return {"metrics": mismatch_metrics(trainer.measure_mismatch())}
    if message["op"] == "retire":
        return {"freed": trainer.retire(RetentionSettings.model_validate(message["settings"]))}
    if message["op"] == "eligible":
        return asdict(trainer.eligible(message["step"], message["start_groups"]))
    if message["op"] == "totals":
        return asdict(trainer.totals())
    if message["op"] == "fresh_rows":
        return {"rows": trainer.fresh_rows()}
    lessons = LessonQuery(**message["lessons"]) if message["lessons"] else None
    if message["op"] == "lessons_left":
        assert lessons is not None, "a round must be named"
        return {"left": trainer.lessons_left(lessons)}
    return trainer.step(message["step"], message["start_groups"], lessons).to_json()


if __name__ == "__main__":
    main(int(sys.argv[1]))
