"""A measuring program as a child process: it waits idle until the parent sends a command, so arms can take turns.

The program runs on one thread, in the environment of its peer. It ends when its input is closed.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.programs.answer import READY
from telemetry.errors import EntenteError

ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the packages of this project."""
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TOKIO_WORKER_THREADS")}
"""Environment variables that limit the peers' thread pools: CPU seconds can be compared on one thread only."""
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}


class PeerError(EntenteError):
    """A measuring program ended or answered nonsense."""


class Child:
    """A running program `benchmarks.peers.programs.NAME`."""

    def __init__(self, python: Path, program: str, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Start the program and wait until it is ready.

        Raises:
            PeerError: it ended before.
        """
        self.program = program
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by close()
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.peers.programs.{program}", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=kept | _QUIET | ONE_THREAD | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
        )
        try:
            while self._line() != READY:  # until then a library may print
                pass
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def request(
        self, command: str, given: Any = None, on_question: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Run a command of the program and return its answer.

        Args:
            on_question: replies to what the program asks meanwhile.

        Raises:
            PeerError: the program ended, or asked without `on_question`.
        """
        self._send({"command": command, "given": given})
        while "question" in (message := self._receive()):
            if on_question is None:
                raise PeerError(f"the program '{self.program}' asked a question that nobody answers: report this")
            self._send(on_question(message["question"]))
        return message["answer"]

    def close(self) -> None:
        """End the program."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _receive(self) -> dict[str, Any]:
        return json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return line.rstrip("\n")

    def _ended(self) -> PeerError:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:] or ["it printed no error"]
        return PeerError(f"the program '{self.program}' of `entente bench peers` ended with {code}: {last[0]}")
