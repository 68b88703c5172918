"""Breaks one core rule of the code at a time, and shows that a named test goes red each time.

The table is `mutations.toml`: one line of code for each rule, and the tests that must notice. A mutation is made in a copy of the
tracked files; the working tree is never changed. The exit code is 0 if every mutation was noticed, and 1 if not.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = "tests/mutations/mutations.toml"
LIMIT_S = 300
"""Seconds for the tests of one mutation. A test that hangs on it has noticed it."""


class TableError(Exception):
    """The table does not fit the code. The message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One line of code, broken."""

    name: str
    rule: str
    """The rule that is broken, in one sentence."""
    file: str
    replace: str
    """Text that the file holds exactly once."""
    by: str
    tests: tuple[str, ...]
    """Ids of tests, each of which must go red."""


def read_table(root: Path) -> list[Mutation]:
    """The table's entries in its order."""
    table = tomllib.loads((root / TABLE).read_text())
    return [Mutation(name=name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in table.items()]


def broken_text(root: Path, mutation: Mutation) -> str:
    """The file's text with the mutation in it. Raises `TableError` where the file does not hold the text once."""
    text = (root / mutation.file).read_text()
    if (count := text.count(mutation.replace)) != 1:
        raise TableError(f"'{mutation.name}': '{mutation.file}' holds {mutation.replace!r} {count} times, not once")
    return text.replace(mutation.replace, mutation.by)


def copy_tree(root: Path, copy: Path) -> None:
    """The tracked files of the working tree, in another folder."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)


def run_tests(tree: Path, tests: Iterable[str]) -> int | None:
    """The exit code of pytest, or none if it did not end in time."""
    command = [sys.executable, "-P", "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def is_noticed(tree: Path, mutation: Mutation) -> bool:
    """Whether each named test is green on the tree as it is, and red on the broken one."""
    file, broken = tree / mutation.file, broken_text(tree, mutation)
    if run_tests(tree, mutation.tests) != 0:
        raise TableError(f"'{mutation.name}': its tests are red on the unbroken code, so they prove nothing")
    text = file.read_bytes()
    try:
        file.write_text(broken)
        return all(run_tests(tree, [test]) in (1, None) for test in mutation.tests)
    finally:
        file.write_bytes(text)


def try_some(root: Path, mutations: Sequence[Mutation]) -> list[str]:
    """Names of the mutations that no test noticed, each tried in one copy of the tree."""
    survived = []
    with tempfile.TemporaryDirectory(prefix="test-mutations-") as folder:
        tree = Path(folder).resolve()
        copy_tree(root, tree)
        for mutation in mutations:
            noticed = is_noticed(tree, mutation)
            sys.stdout.write(f"{'noticed ' if noticed else 'SURVIVED'}  {mutation.name}: {mutation.rule}\n")
            sys.stdout.flush()
            survived += [] if noticed else [mutation.name]
    return survived


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.mutate", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutations to try; all without a name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="try so many at a time, each in a copy of its own")
    given = parser.parse_args(arguments)
    table = read_table(root)
    if unknown := sorted(set(given.names) - {each.name for each in table}):
        parser.error(f"there is no mutation '{unknown[0]}' in {TABLE}")
    some = [each for each in table if not given.names or each.name in given.names]
    try:
        with ThreadPoolExecutor(given.jobs) as pool:
            parts = pool.map(lambda number: try_some(root, some[number :: given.jobs]), range(given.jobs))
            survived = [name for part in parts for name in part]
    except TableError as error:
        sys.stderr.write(f"test-mutations: {error}\n")
        return 1
    sys.stdout.write(f"{len(some) - len(survived)} of {len(some)} mutations noticed\n")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
