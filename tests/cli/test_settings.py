"""`entente settings`: what it prints can be given back; help is one screen."""

import re
import tomllib
from pathlib import Path

import pytest

from entente.cli.settings import FIRST_SETTINGS
from entente.settings.layers import layered_settings
from entente.settings.reference import settings_in
from entente.telemetry.setting_marks import MAY_CHANGE, MAY_CHANGE_RECORDED, STAYS
from tests.command import Entente

LONGEST, WIDEST = 40, 120


@pytest.mark.parametrize("preset", ["laptop", "cluster"])
def test_what_it_prints_is_a_file_that_gives_the_same_settings(preset: str, tmp_path: Path, entente: Entente):
    file = tmp_path / "printed.toml"
    flags = ["--rollouts.forks-per-group", "24", "--inference.model", 'say "no"']
    file.write_text(entente("settings", "--preset", preset, *flags).stdout)
    changed = {"rollouts": {"forks_per_group": 24}, "inference": {"model": 'say "no"'}}
    assert layered_settings("laptop", [file]) == layered_settings(preset, [], changed)


def test_every_setting_is_told_with_what_it_takes_and_whether_a_resumed_run_may_change_it():
    told = {setting.name: setting for setting in settings_in()}
    assert len(told) > 70 and [name for name, setting in told.items() if not setting.description] == []
    assert told["rollouts.forks_per_group"].kind == "integer, ≥ 2 and ≤ 256"
    marked = {
        name: told[name].changes for name in ("training.loss", "storage.max_policy_lag", "inference.urls", "evaluation.every")
    }
    assert list(marked.values()) == [STAYS, MAY_CHANGE_RECORDED, MAY_CHANGE, MAY_CHANGE]
    written = tomllib.loads("\n".join(f"x{i} = {each.default}" for i, each in enumerate(told.values()) if each.default != "none"))
    assert len(written) >= len(told) - 3, "defaults are written as TOML has them"


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
