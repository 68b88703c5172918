"""The help of a command that takes run settings fits one screen, and shows the preset's values."""

import re
from pathlib import Path

import pytest

from entente.cli.main import run
from entente.cli.settings_help import FIRST_SETTINGS

LONGEST, WIDEST = 40, 120


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What the words print, where nothing is a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("entente.cli.environment.prepare_environment", lambda **how: None)

    def ask(*words: str) -> str:
        assert run(list(words)) == 0
        return capsys.readouterr().out

    return ask


def shown(text: str) -> dict[str, str]:
    """Flag -> what stands beside it, on its own line."""
    return {flag: beside.strip() for flag, beside in re.findall(r"^(--\S+)(.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("words", [("train",), ("settings",)], ids=" ".join)
def test_the_help_fits_one_screen_and_ends_with_examples_and_the_way_to_the_rest(told, words: tuple[str, ...]):
    text = told(*words, "--help")
    lines = text.splitlines()
    assert len(lines) <= LONGEST and max(map(len, lines)) <= WIDEST
    assert set(shown(text)) >= {f"--{name.replace('_', '-')}" for name in FIRST_SETTINGS}
    assert f"  entente {' '.join(words)}" in text.split("Examples")[1] and "entente settings" in lines[-1]


def test_the_defaults_are_those_of_the_chosen_preset(told):
    flags = shown(told("train", "--preset", "gpu-24", "--help"))
    assert flags["--steps"].split()[0] == "200" and flags["--training.learning-rate"].split()[0] == "7e-05"
