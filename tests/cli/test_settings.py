"""`entente settings`: what it prints can be given back; help is one screen."""

import re
from pathlib import Path

import pytest

from entente.cli.settings import FIRST_SETTINGS
from entente.settings.layers import layered_settings
from entente.settings.reference import settings_in
from tests.command import Entente

LONGEST, WIDEST = 40, 120


@pytest.mark.parametrize("preset", ["laptop", "cluster"])
def test_what_it_prints_is_a_file_that_gives_the_same_settings(preset: str, tmp_path: Path, entente: Entente):
    file = tmp_path / "printed.toml"
    flags = ["--rollouts.forks-per-group", "24", "--inference.model", 'say "no"']
    file.write_text(entente("settings", "--preset", preset, *flags).stdout)
    changed = {"rollouts": {"forks_per_group": 24}, "inference": {"model": 'say "no"'}}
    assert layered_settings("laptop", [file]) == layered_settings(preset, [], changed)


def test_every_setting_has_a_sentence():
    """What it takes, its default and whether a resumed run may change it are in docs/settings.md: tests/test_reference.py."""
    found = list(settings_in())
    assert len(found) > 70 and [setting.name for setting in found if not setting.description] == []


def shown(text: str) -> dict[str, str]:
    """Flag -> what stands beside it, on its own line."""
    return {flag: beside.strip() for flag, beside in re.findall(r"^(--\S+)(.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("words", [("train",), ("settings",)], ids=" ".join)
def test_the_help_fits_one_screen_and_ends_with_examples_and_the_way_to_the_rest(entente: Entente, words: tuple[str, ...]):
    text = entente(*words, "--help").stdout
    lines = text.splitlines()
    assert len(lines) <= LONGEST and max(map(len, lines)) <= WIDEST
    assert set(shown(text)) >= {f"--{name.replace('_', '-')}" for name in FIRST_SETTINGS}
    assert f"  entente {' '.join(words)}" in text.split("Examples")[1] and "entente settings" in lines[-1]


def test_the_defaults_are_those_of_the_chosen_preset(entente: Entente):
    flags = shown(entente("train", "--preset", "gpu-24", "--help").stdout)
    assert flags["--steps"].split()[0] == "200" and flags["--training.learning-rate"].split()[0] == "7e-05"
