"""The loop of a measuring program: one line of JSON in, one line of JSON out. It uses the standard library only.

A program may ask its parent for something while it works (`ask`), such as the reward of a completion. Whatever else a peer
prints goes to the error stream.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Command = Callable[[Any], Mapping[str, Any]]

READY = '{"ready": true}'
"""The first line of a program."""
_answers: TextIO | None = None


def _send(message: Mapping[str, Any]) -> None:
    assert _answers is not None, "serve() has not begun"
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()


def _own_output() -> TextIO:
    """The output stream, kept for answers; from now on `print` writes to the error stream."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def serve(commands: Mapping[str, Command]) -> None:
    """Answer commands until the input ends. A command is `{"command": NAME, "given": VALUE}`."""
    global _answers
    _answers = _own_output()
    _send(json.loads(READY))
    for line in sys.stdin:
        message = json.loads(line)
        _send({"answer": commands[message["command"]](message["given"])})


def ask(question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the parent, in the middle of a command; returns its reply."""
    _send({"question": question})
    return json.loads(sys.stdin.readline())
