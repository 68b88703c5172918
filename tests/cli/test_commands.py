"""The commands: `entente --help` is one screen, and every help has examples that can be typed."""

import inspect
import re

import pytest

from deploy.site.reference import leaves
from entente.cli.commands import COMMANDS, command_line, overview
from entente.cli.main import run
from tests.command import ROOT

LEAVES = dict(leaves(command_line()))
NAMES = [name for commands in COMMANDS.values() for name in commands]


@pytest.fixture(autouse=True)
def _environment_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)


def test_the_overview_names_every_command_on_one_screen():
    lines = overview().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    named = re.findall(r"^  ([a-z-]+(?:, [a-z-]+)*) ", overview(), re.MULTILINE)
    assert [name for names in named for name in names.split(", ")] == NAMES
    assert sorted(NAMES) == sorted(name for name in command_line() if not name.startswith("-"))
    assert all(len(line.split()) >= 4 for commands in COMMANDS.values() for _, line in commands.values())
    assert len(NAMES) <= 25, "a new command belongs to a group, unless everybody uses it"


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]], ids=str)
def test_help_without_a_command_is_the_overview(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run(words) == 0
    assert capsys.readouterr() == (overview(), "")


def test_a_published_model_that_a_help_or_an_error_names_is_there():
    texts = "\n".join(file.read_text() for file in sorted((ROOT / "entente").rglob("*.py")))
    named = set(re.findall(r"(?<!--to )(?<!New folder, such as )(?<![\w/])models/[\w-]+", texts))
    assert named and all((ROOT / name).is_dir() for name in named), named


def test_the_help_of_a_command_has_an_example_of_it():
    """tests/test_docs.py types all of them."""
    assert len(LEAVES) > 25
    for words, command in LEAVES.items():
        _, _, examples = (inspect.getdoc(command) or "").partition("\n\nExample")
        assert re.search(rf"\bentente {words}\b", examples), words
