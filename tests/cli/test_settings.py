"""`entente settings`: what it prints can be given back, and docs/settings.md is what it writes."""

import re
import tomllib
from pathlib import Path

import pytest

from cli.main import run
from pipeline.run_settings import RunSettings, layered_settings, preset_names
from pipeline.settings_reference import reference, settings_in
from telemetry.setting_marks import MAY_CHANGE, MAY_CHANGE_RECORDED, STAYS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"


@pytest.mark.parametrize("preset", preset_names())
def test_what_it_prints_is_a_file_that_gives_the_same_settings(preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "printed.toml"
    assert (
        run(
            [
                "settings",
                "--preset",
                preset,
                "--rollouts.forks-per-group",
                "24",
                "--alerts.command",
                'say "no"',
                "--output",
                str(file),
            ]
        )
        == 0
    )
    printed = layered_settings("laptop", [file])
    assert printed == layered_settings(preset, [], {"rollouts": {"forks_per_group": 24}, "alerts": {"command": 'say "no"'}})
    assert str(file) in capsys.readouterr().out


def test_every_setting_is_told_with_what_it_takes_and_whether_a_resumed_run_may_change_it():
    told = {setting.name: setting for setting in settings_in()}
    assert [name for name, setting in told.items() if not setting.description] == []
    assert told["rollouts.forks_per_group"].kind == "integer, ≥ 2 and ≤ 256"
    marked = {
        name: told[name].changes for name in ("training.loss", "storage.max_policy_lag", "inference.urls", "evaluation.seed")
    }
    assert list(marked.values()) == [STAYS, MAY_CHANGE_RECORDED, MAY_CHANGE, MAY_CHANGE]
    written = tomllib.loads("\n".join(f"x{i} = {each.default}" for i, each in enumerate(told.values()) if each.default != "none"))
    assert len(written) >= len(told) - 3, "defaults are written as TOML has them"


def test_the_page_of_settings_is_what_the_classes_say():
    assert PAGE.read_text() == reference(), "write it anew: entente settings --markdown --output docs/settings.md"


def test_the_reference_names_every_branch_of_the_tree():
    branches = [name for name, field in RunSettings.model_fields.items() if hasattr(field.annotation, "model_fields")]
    assert re.findall(r"^## `(\w+)`$", reference(), re.MULTILINE) == branches
