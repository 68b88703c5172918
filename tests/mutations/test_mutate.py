"""The core rules are guarded: each mutation of the table makes the tests that it names go red (`make test-mutations`)."""

import subprocess
from pathlib import Path

import pytest

from tests.mutations.mutate import ROOT, TABLE, TableError, broken_text, main, read_table


@pytest.mark.parametrize("mutation", read_table(ROOT), ids=lambda each: each.name)
def test_each_breakage_can_be_made_once_and_names_tests_that_are_there(mutation):
    broken_text(ROOT, mutation)
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), test


@pytest.mark.system
def test_a_rule_that_no_test_guards_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef less(a, b):\n    return a - b\n")
    (tmp_path / "test_sums.py").write_text(
        "import sums\ndef test_add():\n    assert sums.add(2, 1) == 3\ndef test_less():\n    assert sums.less(0, 0) == 0\n"
    )
    (tmp_path / TABLE).parent.mkdir(parents=True)
    entry = '[{}]\nrule = "."\nfile = "sums.py"\nreplace = "{}"\nby = "{}"\ntests = ["test_sums.py::test_{}"]\n'
    (tmp_path / TABLE).write_text(entry.format("add", "a + b", "a * b", "add") + entry.format("less", "a - b", "b - a", "less"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert main(["add"], tmp_path) == 0
    assert main([], tmp_path) == 1
    assert "SURVIVED  less" in capfd.readouterr().out
    (tmp_path / "sums.py").write_text("")
    with pytest.raises(TableError, match="0 times"):
        broken_text(tmp_path, read_table(tmp_path)[0])


@pytest.mark.slow
def test_every_broken_rule_is_noticed():
    assert main(["--jobs", "2"]) == 0
