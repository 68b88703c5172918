"""Connects SQL to a run as its trainer sees it: with its reward weights, and the text of its tokens."""

from pathlib import Path
from threading import Lock

from duckdb import DuckDBPyConnection

from entente.decoding.codec import Codec
from entente.decoding.thinking import read_thought
from entente.settings.find_model import model_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from storage.run_sql import connect


class RunText:
    def __init__(self, settings: RunSettings, run: Path) -> None:
        self._settings, self._run = settings, run
        self._loaded: Codec | None = None
        self._lock = Lock()  # DuckDB asks from several threads
        self.missing = ""
        """Why the tokenizer cannot be loaded; empty if it can, or was not needed."""

    def of_token(self, token: int) -> str | None:
        codec = self._codec()
        return codec and codec.decode([token])

    def of_thought(self, tokens: list[int]) -> tuple[str, bool] | None:
        """Text of a thought and whether it was cut at its limit; None without a tokenizer."""
        codec = self._codec()
        return codec and read_thought(tokens, codec)

    def _codec(self) -> Codec | None:
        with self._lock:
            if self._loaded is None and not self.missing:
                try:
                    self._loaded = Codec(model_of(self._settings, self._run.parent, self._run.name))
                except InputError as error:
                    self.missing = str(error)
            return self._loaded


def connect_run(settings: RunSettings, run: Path, memory_gib: float | None = None) -> "tuple[DuckDBPyConnection, RunText]":
    """Connect to a run with its own reward weights and discount, so that "return" is the trainer's; also its tokens' text."""
    text = RunText(settings, run)
    connection = connect(
        run,
        settings.storage,
        seed=settings.seed,
        memory_gib=memory_gib,
        token_text=text.of_token,
        read_thought=text.of_thought,
    )
    return connection, text
