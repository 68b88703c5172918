"""Every setting has a flag, and a flag wins over files, which win over the preset."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from entente.cli import main
from entente.cli.commands import command_line
from entente.cli.options import settings_from
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings


def leaves(settings: BaseModel, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of the tree by its dotted name, with its value."""
    for field in type(settings).model_fields:
        value = getattr(settings, field)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{name}{field}.")
        else:
            yield f"{name}{field}", value


def as_words(name: str, value: Any) -> list[str]:
    """The flag that gives `value` to the setting `name`."""
    path = name.replace("_", "-")
    if isinstance(value, bool):
        room, _, last = path.rpartition(".")
        return [f"--{path}" if value else f"--{room}.no-{last}"]
    if isinstance(value, dict):
        return [word for key, weight in value.items() for word in (f"--{path}.{key}", str(weight))]
    if isinstance(value, tuple):
        return [word for item in value for word in (f"--{path}", item)] or [f"--{path.replace('.', '.empty-', 1)}"]
    return [f"--{path}", str(value)]


def given(*words: str) -> dict[str, Any]:
    """What `entente train WORDS` is given, by the names of its parameters."""
    _, bound, _ = command_line().parse_args(["train", *words], exit_on_error=False, print_error=False)
    return bound.arguments


def parsed(*words: str) -> RunSettings:
    """The settings that `entente train WORDS` would run with."""
    found = given(*words)
    return settings_from(found.get("preset", "laptop"), found.get("config"), found.get("settings"))


def test_every_setting_can_be_given_as_a_flag():
    rooms: dict[str, dict[str, Any]] = {}
    for name, value in leaves(layered_settings("laptop")):
        rooms.setdefault(name.rpartition(".")[0], {})[name] = value
    assert len(rooms) > 8
    for room, settings in rooms.items():
        found = given(*(word for name, value in settings.items() for word in as_words(name, value)))["settings"]
        for part in filter(None, room.split(".")):
            assert found.model_fields_set == {part}
            found = getattr(found, part)
        chosen = {name: getattr(found, name) for name in found.model_fields_set}
        assert chosen == {name.rpartition(".")[2]: value for name, value in settings.items()}


def test_later_files_win_over_earlier_ones_and_flags_over_all(tmp_path: Path):
    (tmp_path / "a.toml").write_text("steps = 5\nseed = 7\n[rollouts]\nforks_per_group = 4\nstart_groups = 3\n")
    (tmp_path / "b.toml").write_text("seed = 8\n[rollouts]\nstart_groups = 4\n")
    files = ["--config", str(tmp_path / "a.toml"), "--config", str(tmp_path / "b.toml")]
    settings = parsed(*files, "--rollouts.forks-per-group", "6")
    assert (settings.steps, settings.seed) == (5, 8)
    assert (settings.rollouts.start_groups, settings.rollouts.forks_per_group) == (4, 6)
    assert settings.inference == layered_settings("laptop").inference, "what nobody names stays the preset's"


def test_a_flag_that_names_the_default_still_wins_over_a_file(tmp_path: Path):
    default = RunSettings().rollouts.forks_per_group
    (tmp_path / "a.toml").write_text(f"[rollouts]\nforks_per_group = {default + 1}\n")
    assert parsed("--config", str(tmp_path / "a.toml")).rollouts.forks_per_group == default + 1
    flags = ["--config", str(tmp_path / "a.toml"), "--rollouts.forks-per-group", str(default)]
    assert parsed(*flags).rollouts.forks_per_group == default


def test_flags_are_compared_with_other_settings_once_preset_and_files_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    (tmp_path / "a.toml").write_text("[training]\ndecay_steps = 20\n")
    words = ["--config", str(tmp_path / "a.toml"), "--training.rate-schedule", "linear", "--cache.last-year", "1901"]
    assert main.run(["settings", *words]) == 0, "the preset's first_year is 1901, and the default is not"
    for command in (
        ["settings", "--cache.last-year", "1901", "--cache.first-year", "1902"],
        ["cache", "build", "--first-year", "1999"],
    ):
        assert main.run(command) == 2 and "lies after last_year" in capsys.readouterr().err
