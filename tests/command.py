"""The `entente` command for tests: in the test's process, which saves seconds of imports, or in its own, as a user has it."""

import contextlib
import io
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil

ROOT = Path(__file__).resolve().parent.parent
_NOT_INHERITED = ("PREFECT_", "ENTENTE_", "WANDB_", "PYTHONWARNINGS")


def runs(process: psutil.Process, word: str) -> bool:
    """Whether that word is in the process's command line; False where it ended since it was listed, or is a zombie."""
    try:
        return word in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def end_processes_of(home: Path, *, end_by_themselves_s: float = 0.0) -> list[str]:
    """Kill processes that have this PREFECT_HOME and still live after a while; their command lines."""
    until = time.monotonic() + end_by_themselves_s
    while (found := _processes_of(home)) and time.monotonic() < until:
        time.sleep(0.5)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return list(found.values())


def _processes_of(home: Path) -> dict[psutil.Process, str]:
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("PREFECT_HOME") == str(home):
                found[process] = " ".join(process.cmdline())[:120]
    return found


def cells(printed: str) -> list[list[str]]:
    """The rows of a printed table."""
    bare = (line.strip("┃│").replace("┃", "│") for line in printed.splitlines() if line[0] in "┃│")
    return [[cell.strip() for cell in line.split("│")] for line in bare]


def content(folder: Path) -> dict[str, bytes]:
    """Every file and folder below, byte for byte."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


class Entente:
    """The `entente` command in a folder, with none of this process's settings.

    A call runs it in this process; `process` runs it in one of its own, and `start` begins one. Use those for a command that runs
    flows, which need Prefect's settings to themselves, for one that is killed, and where it matters what was imported.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._environment = environment

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `entente WORDS` in this process, in the folder."""
        from entente.cli.main import main

        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
        with self._as_if_alone(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(words))
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        told = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(words, code, *told)

    @contextlib.contextmanager
    def _as_if_alone(self) -> Iterator[None]:
        """The folder, the environment and the warnings of a process of its own, as long as the block lasts."""
        with contextlib.suppress(ModuleNotFoundError):  # tests/pure.py has none
            import prefect  # noqa: F401  # reads its settings once: this process's, not those of the first command

        # One test's signal must not end the next test's command.
        no_signal = mock.patch.multiple("entente.cli.end_by_signal", _heard=0, _reported=False, _nothing_is_open=False)
        with no_signal, mock.patch.dict(os.environ, clear=True), warnings.catch_warnings(), contextlib.chdir(self.folder):
            os.environ.update(self._inherited())
            yield

    def _inherited(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        return kept | self._environment

    def start(
        self, *words: str, program: str = "from entente.cli.main import main; main()", **environment: str
    ) -> subprocess.Popen[str]:
        """Begin `entente WORDS` in a process of its own; `program` may do something before it."""
        return subprocess.Popen(
            [sys.executable, "-c", program, *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT)} | self._inherited() | environment,
        )

    def process(self, *words: str, timeout: float = 900, **how: str) -> subprocess.CompletedProcess[str]:
        """Run `entente WORDS` to its end in a process of its own; `how` as for `start`."""
        with self.start(*words, **how) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)
