"""A setting that became a constant: the value that is fixed now may still be named, another is refused, and old runs open."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pipeline.removed_settings import REMOVED, RENAMED_PRESETS, without_removed
from pipeline.rollout_side import side_settings
from pipeline.run_settings import RunSettings, layered_settings, preset_names, resumed_settings, settings_of
from pipeline.setting_names import setting_names
from storage.runs import RunPaths
from telemetry.errors import InputError


def tree_with(values: dict[str, Any]) -> dict[str, Any]:
    """The laptop's settings as an earlier version stored them, with these removed ones."""
    tree = layered_settings("laptop").model_dump(mode="json")
    for name, value in values.items():
        section, _, last = name.partition(".")
        tree[section][last] = value
    return tree


def stored(tmp_path: Path, values: dict[str, Any]) -> RunPaths:
    paths = RunPaths(tmp_path / "old").create()
    paths.settings.write_text(json.dumps(tree_with(values)))
    return paths


def test_no_removed_setting_is_one_again():
    assert not set(REMOVED) & set(setting_names(RunSettings))


def test_a_preset_that_was_renamed_has_the_settings_of_its_new_name(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "entente")
    for before, now in RENAMED_PRESETS.items():
        assert before not in preset_names() and layered_settings(before) == layered_settings(now)
        assert f"the preset '{before}' is called '{now}' now" in caplog.text


def test_each_is_fixed_at_the_constant_of_its_owner():
    from flows import producer_fleet
    from pipeline import buffered_queue, stretches
    from storage import retention, selection
    from telemetry import alerts, devices, sinks
    from training import settings, trainer
    from workers import pool, supervisor, worker

    owners = (
        producer_fleet,
        buffered_queue,
        stretches,
        retention,
        alerts,
        devices,
        sinks,
        settings,
        trainer,
        pool,
        supervisor,
        worker,
    )
    query = {field.name: field.default for field in fields(selection.SelectionQuery)}
    for name, fixed in REMOVED.items():
        last = name.partition(".")[2]
        found = [getattr(owner, last.upper()) for owner in owners if hasattr(owner, last.upper())] or [query[last]]
        assert set(found) == {fixed}, name


def test_a_run_of_an_earlier_version_opens_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = stored(tmp_path, dict(REMOVED))
    assert settings_of(paths) == layered_settings("laptop", (), {"run": "old", "runs_root": tmp_path})
    assert side_settings(paths).run == "" and capsys.readouterr() == ("", "")


def test_a_run_from_before_a_setting_was_added_does_what_it_did(tmp_path: Path):
    paths = stored(tmp_path, {})
    tree = json.loads(paths.settings.read_text())
    assert (tree["prompts"].pop("chat"), tree["prompts"].pop("own_line")) == ("auto", "last")
    for without in (tree, {name: inner for name, inner in tree.items() if name != "prompts"}):
        paths.settings.write_text(json.dumps(without))
        for found in (settings_of(paths), side_settings(paths), resumed_settings([], {"run": "old", "runs_root": tmp_path})):
            assert (found.prompts.chat, found.prompts.own_line) == ("none", "in_place")
    for name, before, after in (("chat", "none", "template"), ("own_line", "in_place", "last")):
        with pytest.raises(InputError, match=rf"started with prompts.{name} '{before}' and cannot continue with '{after}'"):
            resumed_settings([], {"run": "old", "runs_root": tmp_path, "prompts": {name: after}}, fork=True)


def test_forks_of_a_run_from_before_keep_their_last_winter(tmp_path: Path):
    paths = stored(tmp_path, {})
    tree = json.loads(paths.settings.read_text())
    assert tree["rollouts"].pop("last_winter") is False
    paths.settings.write_text(json.dumps(tree))
    assert settings_of(paths).rollouts.last_winter and side_settings(paths).rollouts.last_winter


def test_a_stored_value_that_no_row_depends_on_is_said_and_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "entente")
    paths = stored(tmp_path, {"inference.request_attempts": 9})
    assert settings_of(paths).inference == layered_settings("laptop").inference
    assert caplog.messages == ["run 'old' was started with inference.request_attempts 9; it is always 4 now"]


@pytest.mark.parametrize("name", ["storage.freshness", "training.outlier_low"])
def test_a_stored_value_that_steps_depend_on_is_refused(tmp_path: Path, name: str):
    with pytest.raises(InputError, match=rf"{name} is no longer a setting: it is always {REMOVED[name]!r}, not 0.25"):
        settings_of(stored(tmp_path, {name: 0.25}))


def test_what_a_user_gives_must_be_the_value_that_is_fixed(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text("[retention]\ndamaged_days = 30\n")
    assert layered_settings("laptop", [file]) == layered_settings("laptop")
    file.write_text("[retention]\ndamaged_days = 3\n")
    with pytest.raises(InputError, match=r"retention.damaged_days is no longer a setting: it is always 30.0, not 3"):
        layered_settings("laptop", [file])
    assert without_removed("no mapping") == "no mapping"


@pytest.mark.parametrize(
    ("before", "opponents"),
    [
        ({"frozen_share": 0.0, "frozen_version": 3}, "random,mover"),
        ({"frozen_share": 0.5, "frozen_version": 3}, "random*0.25,mover*0.25,v3*0.5"),
        ({"frozen_share": 1.0}, "v0"),
    ],
    ids=["never", "half of the start groups", "always the base"],
)
def test_a_share_of_a_frozen_version_is_read_as_weights(tmp_path: Path, before: dict[str, Any], opponents: str):
    names = {f"rollouts.{name}": value for name, value in before.items()}
    paths = stored(tmp_path, {"rollouts.opponents": "random,mover"} | names)
    assert settings_of(paths).rollouts.opponents == side_settings(paths).rollouts.opponents == opponents
