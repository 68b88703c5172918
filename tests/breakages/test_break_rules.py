"""The rules that matter are guarded: each breakage of the table makes the tests that it names go red."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.breakages.break_rules import (
    ROOT,
    Breakage,
    TableError,
    broken_text,
    chosen,
    commit_of,
    main,
    read_table,
    tracked_files,
)

TABLE = read_table(ROOT)
FEWEST = 80


def test_the_table_breaks_enough_rules_and_tells_each_in_a_sentence():
    assert len(TABLE) >= FEWEST
    assert [each.name for each in TABLE if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", each.name)] == []
    assert [each.name for each in TABLE if not re.fullmatch(r"[A-Z].*\.", each.rule) or "\n" in each.replace + each.by] == []
    assert len({(each.file, each.replace) for each in TABLE}) == len(TABLE)


@pytest.mark.parametrize("breakage", TABLE, ids=lambda each: each.name)
def test_each_breakage_can_be_made_once_and_names_tests_that_are_there(breakage: Breakage):
    broken_text(ROOT, breakage)
    assert breakage.tests
    for test in breakage.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


def test_a_sample_follows_from_the_commit_and_changes_with_it():
    ten = chosen(TABLE, (), 10, "one commit")
    assert len(ten) == 10 and ten == chosen(TABLE, (), 10, "one commit") != chosen(TABLE, (), 10, "another")
    with pytest.raises(TableError, match="no breakage 'nothing'"):
        chosen(TABLE, ("nothing",), 0, "")


@pytest.fixture(autouse=True)
def _no_libraries(monkeypatch: pytest.MonkeyPatch):
    """The small projects need none of the libraries that take long to import."""
    monkeypatch.setattr("tests.breakages.break_rules.WARM", ())


def made(root: Path, *breakages: str) -> Path:
    """A small project with two rules, of which one has a test, and a table."""
    (root / "game").mkdir(parents=True)
    (root / "game/__init__.py").write_text("def add(a, b):\n    return a + b\n\n\ndef less(a, b):\n    return a - b\n")
    (root / "tests/breakages").mkdir(parents=True)
    (root / "tests/test_game.py").write_text(
        "import game, pytest\n"
        "def test_add():\n    assert game.add(2, 1) == 3\n"
        "def test_less():\n    assert game.less(0, 0) == 0\n"
        "@pytest.mark.skip\ndef test_skipped():\n    pass\n"
        "def test_red():\n    assert not game\n"
    )
    entries = (f'[[breakage]]\nrule = "A rule."\nfile = "game/__init__.py"\n{each}' for each in breakages)
    (root / "tests/breakages/breakages.toml").write_text("\n".join(entries))
    return root


ADD = 'name = "add"\nreplace = "a + b"\nby = "{}"\ntests = ["tests/test_game.py::test_add"]\n'


def test_a_rule_that_no_test_guards_is_named_and_the_tree_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    less = 'name = "less"\nreplace = "a - b"\nby = "b - a"\ntests = ["tests/test_game.py::test_less"]\n'
    root = made(tmp_path, ADD.format("a * b"), less)
    before = {name: (root / name).read_bytes() for name in tracked_files(root)}
    assert main(["add"], root) == 0
    assert main([], root) == 1
    said = capfd.readouterr().out
    assert re.search(r"^noticed +[\d.]+ s  add$", said, re.MULTILINE)
    assert re.search(r"^survived +[\d.]+ s  less: green: tests/test_game.py::test_less$", said, re.MULTILINE)
    assert "2 breakages: 1 noticed by a red test, 0 by a test that hung, 1 survived, 0 errors of the table" in said
    assert {name: (root / name).read_bytes() for name in tracked_files(root)} == before


@pytest.mark.system
def test_a_test_that_hangs_has_noticed_and_is_reported_as_such(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["--limit-s", "5"], made(tmp_path, ADD.format("__import__('time').sleep(60)"))) == 0
    assert "hung " in (said := capfd.readouterr().out) and "ended after 5 s" in said and "1 by a test that hung" in said


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        pytest.param(ADD.replace("a + b", "a ++ b"), "holds 'a ++ b' 0 times, not once", id="text is gone"),
        pytest.param(ADD.replace("a + b", "return a"), "holds 'return a' 2 times, not once", id="text stands twice"),
        pytest.param(ADD.format("a +"), "as no Python", id="no Python"),
        pytest.param(ADD.format("a + b"), "by itself", id="no change"),
        pytest.param(ADD.replace("test_add", "test_gone"), "not found", id="no such test"),
        pytest.param(ADD.replace("test_add", "test_skipped"), "test_skipped is not run on the unbroken copy", id="skipped"),
        pytest.param(ADD.replace("test_add", "test_red"), "test_red is red on the unbroken copy", id="red before"),
        pytest.param(ADD.format("__import__('nothing')"), "the broken code cannot be run", id="import error"),
    ],
)
def test_a_table_that_proves_nothing_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str], entry: str, sentence: str):
    assert main([], made(tmp_path, entry.format("a * b"))) == 1
    said = capfd.readouterr()
    assert sentence in said.out + said.err


def test_a_tree_without_git_has_a_hash_and_files_of_its_own(tmp_path: Path):
    root = made(tmp_path, ADD.format("a * b"))
    before = commit_of(root)
    (root / "runs").mkdir()
    (root / "runs/something").write_text("a product")
    assert commit_of(root) == before and "runs/something" not in tracked_files(root)
    (root / "game/more.py").touch()
    assert commit_of(root) != before


def break_rules(*options: str) -> None:
    """Run the command on this tree, with its lines shown."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.breakages.break_rules", *options], cwd=ROOT, capture_output=True, text=True
    )
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.system
def test_three_broken_rules_are_noticed():
    """In one job: each imports torch and what stands on it."""
    break_rules("--sample", "3", "--jobs", "1")


@pytest.mark.slow
def test_every_broken_rule_is_noticed():
    break_rules("--jobs", "2")
