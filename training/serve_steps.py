"""Main of the trainer process: answers JSON lines on an inherited socket until the other end closes.

python -m training.serve_steps FD
"""

import json
import logging
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import EntenteError
from training.policy import Policy
from training.settings import TrainingSettings
from training.trainer import Trainer, describe


def main(descriptor: int) -> None:
    """Serve one parent. An expected failure is answered as its sentence; anything else is logged, answered, and ends
    the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    stream = socket.socket(fileno=descriptor).makefile("rw", encoding="utf-8")
    trainer: Trainer | None = None
    for line in stream:
        message = json.loads(line)
        unexpected = False
        try:
            if message["op"] == "open":
                trainer = _open(message)
                answer: dict[str, Any] = {"step_done": trainer.step_done}
            else:
                assert trainer is not None, "the first message must be 'open'"
                answer = _answer(trainer, message)
        except EntenteError as error:
            answer = {"error": type(error).__name__, "sentence": str(error)}
        except Exception as error:
            traceback.print_exc()
            unexpected = True
            answer = {
                "error": "TrainingError",
                "sentence": f"the trainer failed unexpectedly: {type(error).__name__}: {error}",
            }
        try:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
        except BrokenPipeError:
            return
        if unexpected:
            sys.exit(1)


def _open(message: dict[str, Any]) -> Trainer:
    training = TrainingSettings.model_validate(message["training"])
    storage = StorageSettings.model_validate(message["storage"])
    policy = Policy(Path(message["model"]), training)
    return Trainer(RunPaths(Path(message["run"])), policy, training, storage)


def _answer(trainer: Trainer, message: dict[str, Any]) -> dict[str, Any]:
    if message["op"] == "mismatch":
        return {"metrics": describe(trainer.measure_mismatch())}
    report = trainer.step(message["step"], message["start_groups"])
    return {
        "adapter": str(report.adapter.path),
        "adapter_hash": report.adapter.adapter_hash,
        "metrics": report.metrics,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
