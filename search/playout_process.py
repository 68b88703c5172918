"""One process that plays out proposals: `python -m search.playout_process` reads jobs from its input and writes how they ended.

A job is one line of JSON, and so is its answer. The process ends when its input ends, also where its parent was killed.
"""

import json
import os
import sys
from functools import lru_cache

from game.board import Board
from game.snapshot import Snapshot
from search.playouts import play_out
from search.settings import SearchSettings
from telemetry.errors import EntenteError


@lru_cache(maxsize=64)  # a decision comes back once a round, and many games are in progress
def _board(snapshot: str) -> Board:
    parts = json.loads(snapshot)
    return Board.restore(Snapshot(**parts | {"centres": tuple(parts["centres"])}))


def answer(job: bytes) -> bytes:
    """The answer to a job: the values of its playouts, or the sentence of an error."""
    snapshot, power, settings, sets = json.loads(job)
    try:
        board, asked = _board(snapshot), SearchSettings.model_validate_json(settings)
        found = {"values": [play_out(board, power, orders, name, asked) for orders, name in sets]}
    except EntenteError as error:
        found = {"error": str(error)}
    return json.dumps(found).encode() + b"\n"


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # nothing else may write among the answers
    for job in sys.stdin.buffer:
        answers.write(answer(job))
        answers.flush()


if __name__ == "__main__":
    main()
