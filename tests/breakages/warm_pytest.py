"""Runs pytest again and again, each time in a fork of a process that has imported the slow libraries once.

A program of its own, with the working folder and PYTHONPATH of the tree whose tests are run; it imports nothing of that tree.
Its arguments name the libraries. Each line on its standard input is a JSON object with the arguments of pytest, a file for
what it says, a limit in seconds, and whether bytecode is written. The answer is a line with the exit code, or null if the
limit was reached. A run is over with all of its processes, and so it is when standard input closes.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

FOREIGN = 70
"""Exit code where a package of the tree was imported from elsewhere."""


def main() -> None:
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            run(asked)
        sys.stdout.write(json.dumps(wait(child, asked["limit_s"])) + "\n")
        sys.stdout.flush()


def run(asked: dict[str, Any]) -> None:
    """Run pytest, and end this process with its exit code."""
    os.setsid()
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(os.open(asked["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        sys.stdin = open(0)  # noqa: SIM115  # as long as the process
        if not asked["bytecode"]:
            sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        import pytest

        code = int(pytest.main(asked["arguments"]))
        if elsewhere := foreign(Path.cwd()):
            sys.stdout.write(f"imported from elsewhere: {', '.join(elsewhere)}\n")
            code = FOREIGN
        sys.stdout.flush()
    finally:
        os._exit(code)


def foreign(tree: Path) -> list[str]:
    """Files of imported packages that the tree has, and that were not imported from it."""
    packages = {folder.parent.name for folder in tree.glob("*/__init__.py")}
    files = [Path(str(module.__file__)) for name, module in list(sys.modules.items()) if name in packages]
    return [str(file) for file in files if not file.resolve().is_relative_to(tree.resolve())]


def wait(child: int, limit_s: float) -> int | None:
    """Exit code of the child, whose processes are ended with it; none if the limit was reached or nobody waits any more."""
    until = time.monotonic() + limit_s
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until or select.select([0], [], [], 0.02)[0]:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
