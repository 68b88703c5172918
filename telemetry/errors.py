"""The one error tree. A message says what is wrong, where (file, row, policy version), and how to mend it.

EntenteError             exit code 1
├── InputError           exit code 2: what the user gave cannot be used
├── DataError            a file is corrupt, foreign, or of another schema
├── DiskFullError        a file could not be written for want of room
├── EngineError          an inference engine or worker refused a request
│   ├── EngineLostError  it failed, or does not answer: another one may draw the same request
│   └── VersionGoneError it does not serve the policy version, or no longer: a newer one may be asked for
└── TrainingError        the trainer refused a batch, or failed

The command line prints the sentence alone; a traceback only with ``--debug``.
"""

import errno


class EntenteError(Exception):
    """Root of everything raised on purpose; ``exit_code`` is what the process ends with."""

    exit_code = 1


class InputError(EntenteError):
    """A setting, argument or path given by the user cannot be used."""

    exit_code = 2


class DataError(EntenteError):
    """A stored file is corrupt, foreign, or written under another schema."""


class DiskFullError(EntenteError):
    """A file could not be written for want of room; what was whole before still is."""


class EngineError(EntenteError):
    """An inference engine or worker refused a request, or failed."""


class EngineLostError(EngineError):
    """The engine or worker failed, or does not answer; nothing says that the request was at fault."""


class VersionGoneError(EngineError):
    """The policy version asked for is not served, or was retired while the request was in flight."""


class TrainingError(EntenteError):
    """The trainer refused a batch, or failed."""


def disk_full(error: BaseException | None) -> DiskFullError | None:
    """`error` as a full disk, if that is what it comes from, however deep."""
    while error is not None:
        if isinstance(error, DiskFullError):
            return error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" for '{error.filename}'" if error.filename else ""
            return DiskFullError(f"no space is left on the disk{where}: make room; what was whole before still is")
        error = error.__cause__ or error.__context__
    return None
