"""Which run a cache follows, what it then rests on, and which versions go: only those that nothing names."""

import asyncio
import os
from pathlib import Path

import pytest

from entente.settings.layers import layered_settings
from entente.telemetry.errors import InputError
from flows.build_state_cache import NEWEST, _made, build_state_cache, drop_unused, newest_run, refreshed_settings
from state_cache.settings import CacheSettings
from state_cache.store import write_cache
from storage.runs import CACHE_FOLDER


def begin_run(root: Path, name: str, steps: int, cache: CacheSettings | None = None) -> None:
    """A run's settings and the names of its ledgers, which is all that is looked at."""
    settings = layered_settings("laptop", overrides={"run": name, "runs_root": root})
    if cache is not None:
        settings = settings.model_copy(update={"cache": cache})
    ledger = root / name / "ledger"
    ledger.mkdir(parents=True)
    (root / name / "settings.json").write_text(settings.model_dump_json())
    for step in range(1, steps + 1):
        (ledger / f"step-{step:06d}.arrow").touch()


def test_a_refresh_rests_on_the_run_s_own_cache_and_on_steps_that_are_recorded(tmp_path: Path):
    begin_run(tmp_path, "mine", 3)
    settings, laptop = refreshed_settings(tmp_path, "mine", 0.3), layered_settings("laptop")
    assert (settings.from_run, settings.on_policy_share) == ("mine", 0.3)
    assert settings.from_groups == 3 * laptop.rollouts.start_groups
    assert settings.scripted == laptop.cache
    begin_run(tmp_path, "next", 1, settings)
    assert refreshed_settings(tmp_path, "next", 0.25).scripted == laptop.cache, "the share of one run does not pile on another's"


@pytest.mark.parametrize(
    ("run", "share", "sentence"), [("none", 0.3, "no run"), ("new", 0.3, "not trained"), ("mine", 1.0, "out of range")]
)
def test_what_cannot_be_refreshed_is_said_in_a_sentence(tmp_path: Path, run: str, share: float, sentence: str):
    begin_run(tmp_path, "new", 0)
    begin_run(tmp_path, "mine", 1)
    with pytest.raises(InputError, match=sentence):
        refreshed_settings(tmp_path, run, share)


def test_the_newest_run_is_the_one_that_trained_last(tmp_path: Path):
    assert newest_run(tmp_path) == ""
    for age, name in enumerate(("late", "early")):
        begin_run(tmp_path, name, 1)
        step = tmp_path / name / "ledger" / "step-000001.arrow"
        os.utime(step, (1000 - age, 1000 - age))
    begin_run(tmp_path, "untrained", 0)
    assert newest_run(tmp_path) == "late"


def test_a_version_goes_when_no_run_names_it(tmp_path: Path):
    root = tmp_path / CACHE_FOLDER
    plain = CacheSettings()
    old, used, newest = (CacheSettings(from_run="mine", from_groups=groups) for groups in (8, 16, 24))
    paths = {settings.from_groups: write_cache(root, settings, [], []) for settings in (plain, old, used, newest)}
    begin_run(tmp_path, "mine", 3)
    begin_run(tmp_path, "next", 1, used)
    (tmp_path / "next" / "settings.json").rename(tmp_path / "next" / "kept")
    (tmp_path / "next" / "settings.json").write_text("{")
    assert drop_unused(root, tmp_path, paths[24]) == [], "a run that cannot be read may name any of them"
    (tmp_path / "next" / "kept").rename(tmp_path / "next" / "settings.json")
    assert drop_unused(root, tmp_path, paths[24]) == [paths[8].name]
    assert sorted(path for path in root.iterdir()) == sorted(paths[groups] for groups in (0, 16, 24))


def test_a_cache_of_a_run_that_is_gone_cannot_be_made(tmp_path: Path):
    settings = CacheSettings(from_run="gone", from_groups=8)
    with pytest.raises(InputError, match="there is no run 'gone'"):
        asyncio.run(_made(tmp_path / CACHE_FOLDER, settings, tmp_path))


def test_where_no_run_has_trained_the_nightly_refresh_says_so_and_builds_nothing(tmp_path: Path, said: list[str]):
    assert asyncio.run(build_state_cache.fn(runs_root=tmp_path, run=NEWEST)) is None
    assert said == [f"no run in '{tmp_path}' has trained a step yet, so there is no state cache to refresh"]
    assert list(tmp_path.iterdir()) == []
