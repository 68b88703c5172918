"""Runs `make test` in strange environments, one after another: what machines of others have, and this one has not.

Each changes what a process inherits, or works in a copy of the tree. The working tree is never changed. The exit code is 0 if the
tests are green in each. CI takes one for each commit, by its hash. Variables that programs read are not among them, since
tests/plain_environment.py unsets them: tests/test_strange.py runs commands with those.
"""

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entente.telemetry.vllm_environment import FOLDER
from tests.mutations.mutate import ROOT, copy_tree

_NOBODY = 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What is strange about a machine, and how to have it here."""

    meaning: str
    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: str = ""
    """Added to pytest's."""
    umask: int = -1
    prepare: Callable[[], None] | None = None
    """Called in the process of `make`, before it starts."""
    folder: str = ""
    """Name of a folder in which a copy of the tree is tested."""
    user: int | None = None
    """Number of the user who tests, in a copy of the tree."""
    beside: Sequence[str] = ()
    """A command that runs meanwhile."""


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def _one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


_OLD_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OPENBLAS_CORETYPE": "Nehalem"}
_WAITING = "tests/inference tests/rollouts tests/tasks tests/telemetry tests/training/test_process.py"
"""Where tests wait for threads and processes: all of them would take half an hour on half a core."""

ENVIRONMENTS = {
    "umask": Environment(meaning="files that nobody else may read (umask 077)", umask=0o077),
    "files": Environment(meaning="256 open files at most", prepare=_few_files),
    "cpu": Environment(meaning="the instruction set of an old CPU", variables=_OLD_CPU),
    "order": Environment(meaning="tests in random order", arguments=f"--shuffle={random.randrange(10**6)}"),
    "busy": Environment(
        meaning="one core beside a busy loop, for the tests that wait",
        prepare=_one_core,
        arguments=_WAITING,
        beside=(sys.executable, "-c", "while True: pass"),
    ),
    "folder": Environment(meaning="a path with a space and a letter beyond ASCII", folder="ä path"),
    "user": Environment(meaning="another user than root", user=_NOBODY),
}


@contextmanager
def _tree(environment: Environment) -> Iterator[Path]:
    """The tree to test: the working tree, or a copy whose environment borrows the packages of this one."""
    if not environment.folder and environment.user is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory(prefix="strange-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder).resolve() / (environment.folder or "tree")
        tree.mkdir()
        copy_tree(ROOT, tree)
        subprocess.run(["git", "-C", tree, "init", "--quiet"], check=True)
        _borrow_packages(tree)
        if environment.user is not None:
            subprocess.run(["chown", "--recursive", str(environment.user), folder], check=True)
        yield tree


def _borrow_packages(tree: Path) -> None:
    """Make the copy's .venv, and link that of vLLM.

    A folder that a .pth file names brings its packages, but not its own .pth files, so not our tree."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tree / ".venv"], check=True)
    (site,) = (tree / ".venv" / "lib").glob("python*/site-packages")
    (site / "borrowed.pth").write_text(f"{tree}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    if (vllm := Path(sys.prefix).parent / FOLDER).exists():
        (tree / FOLDER).symlink_to(vllm)
    ours = tree / ".venv" / "bin"
    for script in Path(sysconfig.get_path("scripts")).iterdir():
        if script.is_file() and script.read_bytes()[:2] == b"#!" and not (ours / script.name).exists():
            (ours / script.name).write_text(f'#!/bin/sh\nexec "{ours}/python" "{script}" "$@"\n', encoding="utf-8")
            (ours / script.name).chmod(0o755)


def _can_run(tree: Path, user: Mapping[str, Any]) -> bool:
    """Whether the user can run the tree's Python with its packages, which may lie in somebody's home."""
    command = [tree / ".venv" / "bin" / "python", "-c", "import pytest"]
    try:
        return subprocess.run(command, cwd=tree, **user, capture_output=True, check=False).returncode == 0
    except PermissionError:
        return False


def run_in(name: str, arguments: str) -> bool | None:
    """Whether the tests are green in an environment; None if this machine or user cannot have it."""
    environment = ENVIRONMENTS[name]
    if environment.user is not None and os.getuid() != 0:
        return None
    number = environment.user
    user: dict[str, Any] = {} if number is None else {"user": number, "group": number, "extra_groups": []}
    with _tree(environment) as tree:
        variables = {**os.environ, **environment.variables, "ARGS": f"{environment.arguments} {arguments}".strip()}
        if user:
            if not _can_run(tree, user):
                return None
            variables |= {"HOME": str(tree.parent), "TMPDIR": str(tree.parent), "USER": "nobody", "LOGNAME": "nobody"}
        with _beside(environment):
            command = ["make", "--old-file=setup-dev", "test"]  # .venv is there, or borrows
            how = {"umask": environment.umask, "preexec_fn": environment.prepare, **user}
            return subprocess.run(command, cwd=tree, env=variables, check=False, **how).returncode == 0


@contextmanager
def _beside(environment: Environment) -> Iterator[None]:
    if not environment.beside:
        yield
        return
    with subprocess.Popen(environment.beside, preexec_fn=environment.prepare) as companion:
        try:
            yield
        finally:
            companion.kill()


def order_for(commit: str) -> list[str]:
    """All environments that run every test, from that on which follows from the hash of a commit."""
    names = [name for name, each in ENVIRONMENTS.items() if each.arguments != _WAITING]
    first = int(commit, 16) % len(names)
    return names[first:] + names[:first]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    described = "\n".join(f"  {name:10}{each.meaning}" for name, each in ENVIRONMENTS.items())
    parser = argparse.ArgumentParser(
        prog="tests/strange",
        description=f"{__doc__}\nenvironments:\n{described}\n\nARGS='-k loss' tests/strange umask   passes options on to pytest",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments, in this order; all without a name")
    parser.add_argument(
        "--pick", metavar="COMMIT", help="the one that follows from the hash of a commit, or the next that this machine can have"
    )
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.names) - set(ENVIRONMENTS)):
        parser.error(f"there is no environment '{unknown[0]}': name one of {', '.join(ENVIRONMENTS)}")
    red = False
    for name in order_for(given.pick) if given.pick else given.names or ENVIRONMENTS:
        began = time.monotonic()
        sys.stdout.write(f"== strange environment '{name}': {ENVIRONMENTS[name].meaning}\n")
        sys.stdout.flush()
        green = run_in(name, os.environ.get("ARGS", ""))
        verdict = {True: "green", False: "RED", None: "left out, because this machine or user cannot have it"}[green]
        sys.stdout.write(f"== '{name}': {verdict}, {time.monotonic() - began:.0f} s\n")
        red |= green is False
        if given.pick and green is not None:
            break
    return int(red)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that copies and the busy loop end too
    sys.exit(main())
