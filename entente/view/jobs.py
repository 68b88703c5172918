"""Work that a page asks for and that takes a while: one child process at a time, at the lowest priority, which can be cancelled.

A job ends with this process, however it ends (`entente.telemetry.child`)."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from entente.telemetry.child import how_it_ended
from entente.telemetry.errors import InputError

_KEPT = 32
"""Answers of former jobs."""


class Job:
    """`about`: what it is about, by which pages find it."""

    def __init__(self, words: str, about: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.words, self.about = words, about
        self.began, self.cancelled = time.time(), False
        self._output, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - closed with its answer
        self._answer: tuple[dict[str, Any] | None, str] | None = None
        self._lock = threading.Lock()
        self._child = subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-P", "-m", "entente.telemetry.child", *command],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
            env=os.environ | dict(environment),
        )

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    @property
    def last_line(self) -> str:
        """Of what it wrote: progress, or why it failed."""
        end = self._errors.seek(0, os.SEEK_END)
        text = os.pread(self._errors.fileno(), 4096, max(0, end - 4096)).decode(errors="replace")
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

    def answer(self) -> tuple[dict[str, Any] | None, str]:
        """The answer, and why there is none; both empty while it runs."""
        with self._lock:
            if self._answer is None and not self.running:
                self._answer = self._read()
                for file in (self._output, self._errors, self._child.stdin):
                    if file is not None:
                        file.close()
            return self._answer or (None, "")

    def _read(self) -> tuple[dict[str, Any] | None, str]:
        if self.cancelled:
            return None, "It was cancelled."
        self._output.seek(0)
        try:
            if not self._child.returncode:
                return json.loads(self._output.read()), ""
        except ValueError:
            return None, "Its answer cannot be read."
        return None, self.last_line or f"Its process ended {how_it_ended(self._child.returncode)}."

    def cancel(self) -> None:
        if self.running:  # the number of a process that ended may be another's by now
            self.cancelled = True
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self.answer()


class Jobs:
    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._lock = threading.Lock()

    def start(self, words: str, about: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Raises InputError if another one is at work."""
        with self._lock:
            if other := next((job for job in self._jobs if job.running), None):
                raise InputError(f"one thing at a time: {other.words} is at work since {time.time() - other.began:.0f} s")
            self._jobs = [job for job in self._jobs if job.about != about][-_KEPT:]
            self._jobs.append(Job(words, about, command, environment or {}))

    def of(self, about: str) -> Job | None:
        return next((job for job in self._jobs if job.about == about), None)

    def cancel(self, about: str | None = None) -> None:
        """The job that is about this; None: all."""
        for job in self._jobs:
            if about in (None, job.about):
                job.cancel()
