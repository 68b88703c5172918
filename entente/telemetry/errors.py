"""The error tree. A message says what is wrong, where (file, row, policy version), and how to fix it.

EntenteError             exit code 1
├── InputError           exit code 2: the user's input cannot be used
├── DataError            a file is corrupt, foreign, or of another schema
├── DiskFullError        a file could not be written because the disk is full
├── EngineError          an inference engine or worker refused a request
│   ├── EngineLostError  it failed or does not answer: another engine may serve the request
│   └── VersionGoneError it does not serve the policy version (any more): request a newer one
└── TrainingError        the trainer refused a batch, or failed
"""

import errno
from typing import Any


class EntenteError(Exception):
    """Base class; ``exit_code`` is that of the process. The CLI prints the message alone, a traceback only with ``--debug``."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """IPython: the message instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class InputError(EntenteError):
    exit_code = 2


class DataError(EntenteError):
    """A stored file is corrupt, foreign, or written under another schema."""


class DiskFullError(EntenteError):
    """A file could not be written because the disk is full. Existing files are intact."""


class EngineError(EntenteError):
    """An inference engine or worker refused a request, or failed."""


class EngineLostError(EngineError):
    """The engine or worker failed or does not answer. The request itself may be valid."""


class VersionGoneError(EngineError):
    """The requested policy version is not served, or was retired while the request was in flight."""


class TrainingError(EntenteError):
    """The trainer refused a batch, or failed."""


def one_line(error: BaseException) -> str:
    """The type's name if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Of its message; the type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_problem(error: Any) -> str:
    """Place, if it has one, and message of the first error in a ValidationError of pydantic, or in FastAPI's of a request."""
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def disk_full(error: BaseException | None) -> DiskFullError | None:
    """Set if a full disk is among the causes of `error`."""
    while error is not None:
        if isinstance(error, DiskFullError):
            return error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" for '{error.filename}'" if error.filename else ""
            return DiskFullError(f"no space is left on the disk{where}: make room; existing files are intact")
        error = error.__cause__ or error.__context__
    return None
