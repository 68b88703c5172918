"""The flow's side of the trainer process: starts it, sends requests, ends it.

The trainer runs in a child process, so a device fault becomes a failed task, and the trainer and the games do not share Python's
interpreter lock. With several processes torchrun starts them, and ends them all when one ends. Flow and trainer exchange JSON
lines over a socket pair, whose other end is the standard input of all of them. They end when the flow's end closes, also if the
flow was killed.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from entente.telemetry import errors
from entente.telemetry.cards import VARIABLE, Card
from entente.telemetry.errors import EntenteError, TrainingError
from entente.training.messages import ResumePoint, TrainedStep
from entente.training.settings import CARD_SHARE, TrainingSettings
from storage.ledger import Eligible
from storage.lesson_shelf import LessonQuery
from storage.retention import RetentionSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings

ANSWERS_WITHIN_S = 3600.0
"""Seconds within which the trainer must answer a request, such as a step, before it is killed."""
_ENDS_WITHIN_S = 10.0
"""Seconds that `close` waits for the child before it kills it. The run's files are safe against a kill."""


def under_torchrun(processes: int) -> bool:
    """Whether torchrun starts the trainer: it has several processes here, or torchrun's own variable says on several machines."""
    return processes > 1 or "PET_NNODES" in os.environ


def trainer_command(processes: int) -> list[str]:
    """The command that starts a trainer of so many processes on this machine."""
    trainer = [sys.executable, "-P", "-m", "entente.training.serve_steps"]
    if not under_torchrun(processes):
        return trainer
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    alone = [] if "PET_NNODES" in os.environ else ["--standalone"]
    return [*torchrun, *alone, "--max-restarts", "0", "--log-dir", os.devnull, "--no-python", *trainer]


def _loopback() -> str:
    """Name of the network interface that only this machine reaches."""
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, found in interfaces if any(each.address == "127.0.0.1" for each in found))


class TrainerProcess:
    """A running trainer child. Every call blocks until the child answers, so call it from a thread, not from an event loop.

    Calls raise the error that the child reports, and TrainingError if the child ended or does not answer in time.
    """

    def __init__(
        self,
        paths: RunPaths,
        model: Path,
        training: TrainingSettings,
        storage: StorageSettings,
        threads: int,
        cards: Sequence[Card] = (),
        card_share: float = 0.0,
        engine_dtype: str = "float32",
    ) -> None:
        """Start the child, and return while it loads the model; `ready` waits for it.

        Args:
            threads: CPU threads of the trainer's processes together.
            cards: GPUs that they see, one for each; none: as this process.
            card_share: largest share of a card that each may take, if the engine takes the rest; 0: no limit.
            engine_dtype: number format in which the engine computes.
        """
        self._engine_dtype = engine_dtype
        self._log, self._several = paths.trainer_log, under_torchrun(training.processes)
        self._answers_within_s, self._hung = ANSWERS_WITHIN_S, threading.Event()
        parent, child = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        each = str(max(1, threads // training.processes))
        environment |= {
            "OMP_NUM_THREADS": each,
            "MKL_NUM_THREADS": each,
            "TOKENIZERS_PARALLELISM": "false",
            # oneDNN keeps a kernel for each matrix shape, and each micro-batch has another length.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"),
        }
        if self._several and "PET_NNODES" not in os.environ:
            environment.setdefault("GLOO_SOCKET_IFNAME", _loopback())  # else gloo looks the machine's name up, and listens there
        if cards:
            environment[VARIABLE] = ",".join(card.uuid for card in cards)
        if card_share:
            environment[CARD_SHARE] = f"{card_share:.4f}"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                trainer_command(training.processes),
                stdin=child.fileno(),
                stdout=log,
                stderr=log,
                env=environment,
                # Only the parent receives Ctrl-C; it then closes its end of the socket.
                start_new_session=True,
            )
        child.close()
        self._socket = parent
        self._answers = parent.makefile("r", encoding="utf-8")
        opening = {
            "op": "open",
            "run": str(paths.root),
            "model": str(model),
            "training": training.model_dump(mode="json"),
            "storage": storage.model_dump(mode="json"),
        }
        self._resume_point: ResumePoint | None = None
        try:
            self._send(opening)
        except TrainingError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def ready(self) -> ResumePoint:
        """Wait until the child has loaded its model and the run's newest checkpoint; returns where the run continues."""
        if self._resume_point is None:
            self._resume_point = ResumePoint.from_json(self._receive())
        return self._resume_point

    def fresh_rows(self) -> int:
        """See `Trainer.fresh_rows`."""
        return int(self._ask({"op": "fresh_rows"})["rows"])

    def eligible(self, step: int, start_groups: int) -> Eligible:
        """See `Trainer.eligible`."""
        return Eligible(**self._ask({"op": "eligible", "step": step, "start_groups": start_groups}))

    def retire(self, settings: RetentionSettings) -> int:
        """See `Trainer.retire`."""
        return int(self._ask({"op": "retire", "settings": settings.model_dump(mode="json")})["freed"])

    def measure_mismatch(self) -> dict[str, float]:
        """See `Trainer.measure_mismatch`; returns metrics."""
        return self._ask({"op": "mismatch", "engine": self._engine_dtype})["metrics"]

    def lessons_left(self, query: LessonQuery) -> int:
        """See `Trainer.lessons_left`."""
        return int(self._ask({"op": "lessons_left", "lessons": asdict(query)})["left"])

    def step(self, step: int, start_groups: int, lessons: LessonQuery | None = None) -> TrainedStep:
        """See `Trainer.step`."""
        message = {"op": "step", "step": step, "start_groups": start_groups, "lessons": lessons and asdict(lessons)}
        return TrainedStep.from_json(self._ask(message))

    def close(self) -> None:
        """Close the socket, which ends the child, and wait; kill the child if it does not end within seconds.

        A thread that waits for an answer gets a TrainingError. It is no error if the child has ended already.
        """
        with contextlib.suppress(OSError):  # macOS raises if the other end is closed already
            # `close` alone would wait for a reading thread, and the child would not notice it.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._socket.close()
        try:
            self._process.wait(timeout=_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.ready()
        self._send(message)
        return self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            # Not buffered, so that `close` has no unsent rest of a message to send.
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError) as error:
            self._receive()  # raises why the child ended, if it said so
            raise self._ended_error() from error

    def _receive(self) -> dict[str, Any]:
        watch = threading.Timer(self._answers_within_s or threading.TIMEOUT_MAX, self._kill_hung_child)
        watch.daemon = True
        watch.start()
        try:
            line = self._answers.readline()
        except (OSError, ValueError) as error:
            raise self._ended_error() from error
        finally:
            watch.cancel()
        if not line:
            raise self._ended_error()
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer["error"], EntenteError)
            raise kind(answer["sentence"])
        return answer

    def _kill_hung_child(self) -> None:
        """Kill the child. The thread that waits for its answer then raises TrainingError."""
        self._hung.set()
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (child := psutil.Process(self._process.pid), *child.children(recursive=True)):
                process.kill()

    def _ended_error(self) -> TrainingError:
        """The error that says how the child ended."""
        try:
            code: int | str = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = "still running"
        if self._hung.is_set():
            within = f"{self._answers_within_s:g} s"
            return TrainingError(f"the trainer process did not answer within {within}, and was ended; its log is {self._log}")
        if self._several:
            return TrainingError(
                f"one of the trainer's processes ended, so torchrun ended them all; the last lines are in {self._log}: resume "
                "the run, which repeats the step"
            )
        return TrainingError(f"the trainer process ended (exit code {code}); its last lines are in {self._log}")
