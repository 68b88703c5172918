"""The trainer's own process, seen from the flow: start it, ask it, end it.

The trainer computes in a child, on CPU as on CUDA, so that a device fault ends as a failed task and the trainer's
Python never competes with
the games'. It is started before vLLM is imported, which would leave its own variables in the environment. Parent and child
speak JSON lines over a socket pair; the child ends by itself when the parent's end closes, however the parent died.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.retention import RetentionSettings
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.totals import Eligible, Totals
from telemetry import errors
from telemetry.errors import EntenteError, TrainingError
from training.messages import ResumePoint, TrainedStep
from training.settings import TrainingSettings

_ENDS_WITHIN_S = 10.0
"""A child in the middle of a step is not waited for longer: its files are safe against a kill."""


class TrainerProcess:
    """A running trainer child; every call blocks until it answers (call it from a thread, not from an event loop)."""

    def __init__(
        self,
        paths: RunPaths,
        model: Path,
        training: TrainingSettings,
        storage: StorageSettings,
        threads: int,
        fork: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the child; it loads the model while the caller goes on. `ready` waits for it.

        Args:
            fork: fields of a `training.lineage.Fork`, to go on under other settings.
        """
        self._log = paths.trainer_log
        self._answers_within_s, self._hung = training.answers_within_s, threading.Event()
        parent, child = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD",)}
        environment |= {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "training.serve_steps", str(child.fileno())],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                # Ctrl-C reaches the parent alone, which then closes its end.
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
            "fork": fork,
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
        """Wait until the child has loaded its model and the run's newest checkpoint; where the run goes on."""
        if self._resume_point is None:
            self._resume_point = ResumePoint.from_json(self._receive())
        return self._resume_point

    def fresh_rows(self) -> int:
        """See `Trainer.fresh_rows`."""
        return int(self._ask({"op": "fresh_rows"})["rows"])

    def eligible(self, step: int, start_groups: int) -> Eligible:
        """See `Trainer.eligible`."""
        return Eligible(**self._ask({"op": "eligible", "step": step, "start_groups": start_groups}))

    def totals(self) -> Totals:
        """See `Trainer.totals`."""
        return Totals(**self._ask({"op": "totals"}))

    def retire(self, settings: RetentionSettings) -> int:
        """See `Trainer.retire`."""
        return int(self._ask({"op": "retire", "settings": settings.model_dump(mode="json")})["freed"])

    def measure_mismatch(self) -> dict[str, float]:
        """See `Trainer.measure_mismatch`; as metrics."""
        return self._ask({"op": "mismatch"})["metrics"]

    def step(self, step: int, start_groups: int) -> TrainedStep:
        """See `Trainer.step`."""
        return TrainedStep.from_json(self._ask({"op": "step", "step": step, "start_groups": start_groups}))

    def close(self) -> None:
        """Close the line, which ends the child, and wait for it; kill it if it does not end within seconds.

        Another thread may be waiting for an answer: it gets a TrainingError. A child that is gone already is no error here.
        """
        with contextlib.suppress(OSError):  # macOS refuses to shut down a line whose other end is gone
            # Closing alone would wait for a thread that reads, and the child would not see the end.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._answers.close()
        self._socket.close()
        try:
            self._process.wait(timeout=_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.ready()
        self._send(message)
        return self._receive()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            # Without a buffer: nothing of a message that could not be sent is left for `close` to send.
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise self._died() from error

    def _receive(self) -> dict[str, Any]:
        watch = threading.Timer(self._answers_within_s or threading.TIMEOUT_MAX, self._give_up)
        watch.daemon = True
        watch.start()
        try:
            line = self._answers.readline()
        except (OSError, ValueError) as error:
            raise self._died() from error
        finally:
            watch.cancel()
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer["error"], EntenteError)
            raise kind(answer["sentence"])
        return answer

    def _give_up(self) -> None:
        """End a child that hangs: whoever waits for it then hears that it died, and the run may go on with another."""
        self._hung.set()
        self._process.kill()

    def _died(self) -> TrainingError:
        try:
            code: int | str = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = "still running"
        if self._hung.is_set():
            within = f"{self._answers_within_s:g} s, training.answers_within_s"
            return TrainingError(f"the trainer process did not answer within {within}, and was ended; its log is {self._log}")
        return TrainingError(f"the trainer process ended (exit code {code}); its last lines are in {self._log}")
