"""The one error tree. A message says what is wrong, where (file, row, policy version), and how to mend it.

EntenteError             exit code 1
├── InputError           exit code 2: what the user gave cannot be used
├── DataError            a file is corrupt, foreign, or of another schema
├── EngineError          an inference engine or worker refused or failed
└── TrainingError        the trainer refused a batch, or failed

The command line prints the sentence alone; a traceback only with ``--debug``.
"""


class EntenteError(Exception):
    """Root of everything raised on purpose; ``exit_code`` is what the process ends with."""

    exit_code = 1


class InputError(EntenteError):
    """A setting, argument or path given by the user cannot be used."""

    exit_code = 2


class DataError(EntenteError):
    """A stored file is corrupt, foreign, or written under another schema."""


class EngineError(EntenteError):
    """An inference engine or worker refused a request, or failed."""


class TrainingError(EntenteError):
    """The trainer refused a batch, or failed."""
