"""The program of one stage's process.

    python -m smoke.stage NAME --out FILE --folder FOLDER --device cpu|cuda [--model MODEL] [--shape SHAPE]

It prints the result as one line of JSON and writes it to FILE. The exit code is 0 if the stage passed, else 1. The standard input
is a pipe that nobody writes to: it closes when the parent process ends, and then this process group ends too.
"""

import argparse
import importlib
import json
import os
import stat
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from pipeline.threads import apply_threads, usable_cores
from smoke.job import SHAPES, STAGES, Found, Job, Stage, StageFailed, StageResult
from telemetry.errors import EntenteError
from telemetry.parent import end_with_pipe


def run_stage(stage: Stage, job: Job) -> StageResult:
    """Run `stage` in this process. A failure of any kind is a result."""
    try:
        found: Found = importlib.import_module(stage.module).run(job)
    except Exception as error:
        traceback.print_exc()
        attempt = error.attempt if isinstance(error, StageFailed) else ""
        figures = error.figures if isinstance(error, StageFailed) else {}
        return StageResult(
            stage=stage.name, state="failed", sentence=_in_a_sentence(error), attempt=attempt or stage.advice, figures=figures
        )
    return StageResult(stage=stage.name, state="passed", sentence=found.sentence, figures=found.figures, notes=tuple(found.notes))


def say(line: str) -> None:
    """Write a line to the log, which the person who waits may read."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _in_a_sentence(error: BaseException) -> str:
    text = str(error) if isinstance(error, EntenteError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:500]


def parse_job(words: Sequence[str] | None) -> Job:
    """The job that the options of a command line describe."""
    return _job(_options().parse_args(words))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m smoke.stage", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    return parser


def _job(given: argparse.Namespace) -> Job:
    return Job(device=given.device, model=given.model, shape=given.shape, folder=given.folder.resolve())


def main(words: Sequence[str] | None = None) -> None:
    """Run the stage of the command line, and end the process."""
    parser = _options()
    parser.add_argument("name", choices=[stage.name for stage in STAGES])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        end_with_pipe()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs to the log
    apply_threads(usable_cores())
    stage = next(each for each in STAGES if each.name == given.name)
    result = run_stage(stage, _job(given))
    text = json.dumps(result.as_object())
    aside = given.out.with_suffix(".part")
    aside.write_text(text)
    os.replace(aside, given.out)
    channel.write(text + "\n")
    channel.flush()
    sys.stderr.flush()
    os._exit(0 if result.passed else 1)  # threads of vLLM may still run


if __name__ == "__main__":
    main()
