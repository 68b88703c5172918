"""Answers of endpoints in a file, JSON lines: the same question asked again gets the same answer without an endpoint.

A line is appended when its answer has come. An incomplete line, as after a kill, is skipped, and its question is asked again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from storage.files import make_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """One answer."""

    key: str
    """See `answer_key`."""
    player: str
    phase: str
    power: str
    text: str
    """What the model wrote; empty if there was no answer."""
    failed: str
    """Why there was no answer; empty if there was one."""
    tokens: int


_ANSWER = TypeAdapter(StoredAnswer)


def answer_key(player: str, dice: str, messages: Sequence[Any]) -> str:
    """Name of a question: the endpoint, the name of the game's dice, and the messages. Equal questions of one game, or of the
    forks of one start group, are one question."""
    return hashlib.sha256(json.dumps([player, dice, messages]).encode()).hexdigest()[:32]


class AnswerFile:
    """The answers of one match or run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._found: dict[str, StoredAnswer] | None = None
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        self._read()
        return self._tokens

    def get(self, key: str) -> StoredAnswer | None:
        """The answer to this question; None if it was not asked yet."""
        return self._read().get(key)

    def add(self, answer: StoredAnswer) -> None:
        """Append an answer on a new line, even if the last line of the file is incomplete."""
        found = self._read()
        make_directory(self._file.parent)
        with open(self._file, "ab") as file:
            # Plain ASCII: a terminal that shows the file obeys nothing that a model wrote.
            file.write((b"\n" if file.tell() else b"") + json.dumps(asdict(answer)).encode())
        found[answer.key] = answer
        self._tokens += answer.tokens

    def _read(self) -> dict[str, StoredAnswer]:
        if self._found is None:
            self._found = {}
            for line in self._file.read_bytes().splitlines() if self._file.is_file() else ():
                try:
                    answer = _ANSWER.validate_json(line)
                except ValidationError:
                    continue
                self._found[answer.key] = answer
            self._tokens = sum(answer.tokens for answer in self._found.values())
        return self._found
