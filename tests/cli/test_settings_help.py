"""The help of a command that takes run settings fits one screen, that of all settings three; it shows the preset's values."""

import re
from pathlib import Path

import pytest

from entente.cli.main import run
from entente.settings.run_settings import RunSettings, layered_settings
from entente.settings.setting_names import FIRST_SETTINGS, setting_names

LONGEST, LONGEST_ALL, WIDEST = 50, 160, 120


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
    assert f"  entente {' '.join(words)}" in text.split("Examples")[1] and "--help-all" in lines[-1]


@pytest.mark.parametrize(
    ("words", "steps", "rate"),
    [
        pytest.param(("train", "--preset", "gpu-24", "--help"), "200", "7e-05", id="gpu-24"),
    ],
)
def test_the_defaults_are_those_of_the_chosen_preset(told, words: tuple[str, ...], steps: str, rate: str):
    flags = shown(told(*words))
    assert flags["--steps"].split()[0] == steps and flags["--training.learning-rate"].split()[0] == rate


def test_help_all_shows_every_setting_and_its_default_in_the_preset(told):
    text = told("train", "--help-all")
    flags = shown(text)
    assert len(text.splitlines()) <= LONGEST_ALL
    assert set(flags) >= {f"--{name.replace('_', '-')}" for name in setting_names(RunSettings)}
    assert flags["--cache.train-snapshots"].startswith(str(layered_settings("laptop").cache.train_snapshots))
