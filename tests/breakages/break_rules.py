"""Breaks one rule of the code at a time, and shows that a named test goes red each time.

The table is `breakages.toml`: one entry for each breakage, with one line of code and the tests that must notice it. Each breakage
is made in a copy of the tracked files in a temporary folder; the working tree is never changed. The named tests run once on the
unbroken copy first, so that red means the breakage. A breakage whose tests stay green has survived: nothing guards that rule.

The exit code is 0 if no breakage survived, and 1 if one did or if the table is wrong.
"""

import argparse
import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
TABLE = "tests/breakages/breakages.toml"
LIMIT_S = 180.0
"""Seconds for the tests of one breakage. A breakage that makes a test hang counts as noticed, and is reported as such."""
BASELINE_S = 1800.0
"""Seconds for all named tests on the whole copy."""

WARM = (
    "pytest",
    "numpy",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "duckdb",
    "torch",
    "transformers",
    "peft",
    "pydantic",
    "diplomacy",
)
"""Libraries that take long to import: once for each job, not once for each breakage."""

_NOT_COPIED = {".git", ".venv", ".hypothesis", ".pytest_cache", ".ruff_cache", "__pycache__", "build", "dist", "runs", "wandb"}
"""Folders that a tree without git's list of files may hold beside its sources."""
_NOT_A_TEST = ("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError", "NameError")
"""Errors of a breakage that is no code any more; a test that meets one has not noticed a broken rule."""

EXAMPLES = """examples:
  python -m tests.breakages.break_rules --jobs 2               all breakages, two at a time
  python -m tests.breakages.break_rules loss-sign clip-low     two of them, by name
  python -m tests.breakages.break_rules --sample 10            ten of them, chosen by the hash of the commit
  python -m tests.breakages.break_rules --list                 their names and the rules that they break
"""


class TableError(Exception):
    """The table or the tree is not fit for a run. The message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakage:
    """One line of code, broken."""

    name: str
    """Letters, digits and hyphens; one of a kind."""
    rule: str
    """The rule that is broken, in one sentence."""
    file: str
    """Path below the root."""
    replace: str
    """Text that the file holds exactly once."""
    by: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Ids of tests, without or with a parameter, each of which must go red."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one breakage."""

    breakage: Breakage
    verdict: Literal["noticed", "hung", "survived", "error"]
    seconds: float
    """Of the tests, with their start."""
    why: str = ""
    """Names the tests that stayed green, or the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What pytest came to."""

    code: int
    """Its exit code."""
    last: str
    """The last lines that it said."""
    results: dict[str, list[str | None]]
    """For each test asked for, what its cases met: see `read_results`."""


def read_table(root: Path) -> list[Breakage]:
    """The table's entries in its order. Raises `TableError` where an entry is not whole."""
    try:
        entries = tomllib.loads((root / TABLE).read_text())["breakage"]
        found = [Breakage(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise TableError(f"'{root / TABLE}' is no table of breakages: {error}") from error
    if twice := [name for name, count in Counter(each.name for each in found).items() if count > 1]:
        raise TableError(f"breakage '{twice[0]}' stands twice in '{TABLE}'")
    return found


def broken_text(root: Path, breakage: Breakage) -> str:
    """The file's text with the breakage in it. Raises `TableError` where it cannot be made, or where it is no Python any more."""
    file = root / breakage.file
    if not file.is_file():
        raise TableError(f"breakage '{breakage.name}': there is no file '{breakage.file}'")
    text = file.read_text()
    if (count := text.count(breakage.replace)) != 1:
        raise TableError(f"breakage '{breakage.name}': '{breakage.file}' holds {breakage.replace!r} {count} times, not once")
    broken = text.replace(breakage.replace, breakage.by)
    if broken == text:
        raise TableError(f"breakage '{breakage.name}' replaces {breakage.replace!r} by itself")
    if file.suffix == ".py":
        try:
            ast.parse(broken)
        except SyntaxError as error:
            raise TableError(f"breakage '{breakage.name}' leaves '{breakage.file}' as no Python: {error}") from error
    return broken


def chosen(breakages: Sequence[Breakage], names: Sequence[str], sample: int, commit: str) -> list[Breakage]:
    """Those named, or `sample` of all by the hash of the commit and of their names, or all."""
    if unknown := sorted(set(names) - {each.name for each in breakages}):
        raise TableError(f"there is no breakage '{unknown[0]}': `--list` names them")
    if names:
        return [each for each in breakages if each.name in names]
    if not sample:
        return list(breakages)
    by_hash = sorted(breakages, key=lambda each: hashlib.sha256(f"{commit} {each.name}".encode()).digest())
    return [each for each in breakages if each in by_hash[:sample]]


def tracked_files(root: Path) -> list[str]:
    """Paths below the root of what git tracks or would track; without git, of all that is no product of a build or a run."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if (root / ".git").exists():
        names = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0")
        return sorted({name for name in names if name and os.path.lexists(root / name)})
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_COPIED]
        found += [str((Path(folder) / name).relative_to(root)) for name in files if not name.endswith(".pyc")]
    return sorted(found)


def commit_of(root: Path) -> str:
    """The commit's hash; without git, a hash of all files."""
    if (root / ".git").exists():
        return subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
    digest = hashlib.sha256()
    for name in tracked_files(root):
        digest.update(f"{name}\0".encode() + hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()


def copy_tree(root: Path, copy: Path) -> None:
    """The tracked files, with their times, in another folder."""
    for name in tracked_files(root):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name, follow_symlinks=False)


class Tree:
    """A copy of the tree, and a process that runs its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._said, self._results = folder.with_name(f"{folder.name}.txt"), folder.with_name(f"{folder.name}.xml")
        there = folder.with_name(f"{folder.name}-tmp")
        there.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONDONTWRITE"))}
        self._environment = {**kept, "PYTHONPATH": str(folder), "TMPDIR": str(there)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("warm_pytest.py")), *WARM],
            cwd=folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def check_imports(self) -> None:
        """Raises `TableError` unless the copy's packages are those that are imported."""
        ask = [sys.executable, "-P", "-c", "import game; print(game.__file__)"]
        done = subprocess.run(ask, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False)
        found = done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]
        if done.returncode or not Path(found).is_relative_to(self.folder):
            raise TableError(f"Python does not import the copy in '{self.folder}' but '{found}': nothing would be proved")

    def run(self, tests: Sequence[str], limit_s: float, *options: str, bytecode: bool) -> Ended | None:
        """Run tests; none if they did not end in time. Raises `TableError` if the process that runs them is gone."""
        for file in (self._said, self._results):
            file.unlink(missing_ok=True)
        usual = ["-q", "-p", "no:cacheprovider", "--tb=line", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = [*usual, f"--junitxml={self._results}", *options, *tests]
        asked = {"arguments": arguments, "said": str(self._said), "limit_s": limit_s, "bytecode": bytecode}
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except (OSError, ValueError):
            answer = ""
        if not answer:
            raise TableError(f"the process that runs the tests of '{self.folder}' is gone")
        if (code := json.loads(answer)) is None:
            return None
        last = " ".join(self._said.read_text(errors="replace").strip().splitlines()[-2:])
        return Ended(code=code, last=last, results=read_results(self._results, tests) if self._results.is_file() else {})

    def close(self) -> None:
        """End the process, and what it runs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def read_results(results: Path, tests: Iterable[str]) -> dict[str, list[str | None]]:
    """For each test, what its cases met: None for a pass, otherwise the message of the failure, the error or the skip."""
    found: dict[str, list[str | None]] = {test: [] for test in tests}
    for case in ET.parse(results).getroot().iter("testcase"):
        node = case.get("classname", "").replace(".", "/") + ".py::" + case.get("name", "")
        met = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        said = None if met is None else f"{met.tag}: {met.get('message', '')}"
        for test in {node, node.partition("[")[0]} & found.keys():
            found[test].append(said)
    return found


def check_whole(trees: Sequence[Tree], breakages: Sequence[Breakage]) -> None:
    """Raises `TableError` unless every named test is collected and passes on the unbroken copies."""
    tests = sorted({test for each in breakages for test in each.tests})
    files = sorted({test.partition("::")[0] for test in tests})

    def check_some(tree: Tree, some: set[str]) -> None:
        if not (mine := [test for test in tests if test.partition("::")[0] in some]):
            return
        ended = tree.run(mine, BASELINE_S, bytecode=True)
        if ended is None:
            raise TableError(f"the named tests did not end within {BASELINE_S:g} s on the unbroken copy")
        if ended.code not in (0, 1):
            raise TableError(f"pytest cannot run the named tests on the unbroken copy (exit code {ended.code}): {ended.last}")
        for test, met in ended.results.items():
            if wrong := [each for each in met if each is not None and not each.startswith("skipped")]:
                raise TableError(f"{test} is red on the unbroken copy, so it proves nothing: {wrong[0]}")
            if None not in met:
                raise TableError(f"{test} is not run on the unbroken copy: it is not collected, or is skipped here")

    with ThreadPoolExecutor(len(trees)) as pool:
        list(pool.map(check_some, trees, (set(files[number :: len(trees)]) for number in range(len(trees)))))


def try_breakage(tree: Tree, breakage: Breakage, limit_s: float) -> Outcome:
    """Break the copy, run the named tests, and mend it."""
    file, broken = tree.folder / breakage.file, broken_text(tree.folder, breakage)
    text, times = file.read_bytes(), file.stat()
    began = time.monotonic()
    try:
        file.write_text(broken)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 10**10))  # no bytecode of the whole file fits it
        ended = tree.run(breakage.tests, limit_s, *(["-x"] if len(breakage.tests) == 1 else []), bytecode=False)
    finally:
        file.write_bytes(text)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    outcome = Outcome(breakage=breakage, verdict="noticed", seconds=time.monotonic() - began)
    if ended is None:
        return replace(outcome, verdict="hung", why=f"a test hung, and was ended after {limit_s:g} s")
    if ended.code not in (0, 1):
        return replace(outcome, verdict="error", why=f"pytest did not run the tests (exit code {ended.code}): {ended.last}")
    green = []
    for test, met in ended.results.items():
        red = [each for each in met if each is not None and not each.startswith("skipped")]
        if unfit := [each for each in red if any(f" {kind}:" in each for kind in _NOT_A_TEST)]:
            return replace(outcome, verdict="error", why=f"the broken code cannot be run: {unfit[0]}")
        green += [] if red else [test]
    return replace(outcome, verdict="survived", why=f"green: {', '.join(green)}") if green else outcome


def break_rules(
    root: Path, breakages: Sequence[Breakage], say: Callable[[str], None], *, jobs: int = 1, limit_s: float = LIMIT_S
) -> list[Outcome]:
    """Try each breakage in copies of the tree, one copy for each job. Raises `TableError` first, if the table is wrong."""
    for each in breakages:
        broken_text(root, each)
    with tempfile.TemporaryDirectory(prefix="break-rules-") as place, ThreadPoolExecutor(jobs) as pool, ExitStack() as opened:
        trees: list[Tree] = []
        free: SimpleQueue[Tree] = SimpleQueue()
        for number in range(min(jobs, len(breakages))):
            copy_tree(root, folder := Path(place).resolve() / f"tree-{number}")
            trees.append(tree := Tree(folder))
            opened.callback(tree.close)
            free.put(tree)
        for tree in trees:
            tree.check_imports()
        began = time.monotonic()
        check_whole(trees, breakages)
        say(f"the named tests pass on the unbroken copy: {time.monotonic() - began:.0f} s")

        def try_one(breakage: Breakage) -> Outcome:
            tree = free.get()
            try:
                outcome = try_breakage(tree, breakage, limit_s)
            finally:
                free.put(tree)
            say(f"{outcome.verdict:8} {outcome.seconds:6.1f} s  {breakage.name}{f': {outcome.why}' if outcome.why else ''}")
            return outcome

        return list(pool.map(try_one, breakages))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.breakages.break_rules",
        description="Break one rule of the code at a time in a copy, and show that a named test goes red each time.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="breakages to try; all without a name")
    parser.add_argument("--list", action="store_true", help="list breakages and rules, and try none")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="try N, chosen by the hash of the commit")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="try so many at a time, each in a copy of its own")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, metavar="S", help="seconds for one breakage")
    given = parser.parse_args(arguments)
    if given.jobs < 1 or given.sample < 0 or given.limit_s <= 0:
        parser.error("--jobs and --limit-s must be above 0, and --sample 0 or more")

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    try:
        breakages = read_table(root)
        if given.list:
            for each in breakages:
                say(f"{each.name:32} {each.rule}")
            return 0
        commit = commit_of(root) if given.sample else ""
        some = chosen(breakages, given.names, given.sample, commit)
        if given.sample:
            say(f"{len(some)} of {len(breakages)} breakages, chosen by {commit[:12]}: {', '.join(each.name for each in some)}")
        outcomes = break_rules(root, some, say, jobs=given.jobs, limit_s=given.limit_s)
    except TableError as error:
        sys.stderr.write(f"break-rules: {error}\n")
        return 1
    counts = Counter(outcome.verdict for outcome in outcomes)
    for outcome in outcomes:
        if outcome.verdict in ("survived", "error"):
            say(f"\n{outcome.verdict}: {outcome.breakage.name}\n  {outcome.breakage.rule}\n  {outcome.why}")
    say(
        f"\n{len(outcomes)} breakages: {counts['noticed']} noticed by a red test, {counts['hung']} by a test that hung, "
        f"{counts['survived']} survived, {counts['error']} errors of the table"
    )
    return int(counts["survived"] + counts["error"] > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
