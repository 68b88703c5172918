"""Which run a cache follows, what it then rests on, and which versions go: only those that nothing names."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest

from entente.cli.cache import refresh
from entente.game.scripted import player
from entente.settings.cache_version import newest_file, newest_refresh, with_cache_version
from entente.settings.layers import layered_settings, settings_of
from entente.telemetry.errors import InputError
from flows.build_state_cache import (
    _describe_refresh,
    _made,
    build_state_cache,
    drop_unused,
    newest_run,
    refreshed_settings,
    show_refresh,
)
from flows.open_run import prepare_cache
from state_cache.settings import NEWEST, CacheSettings
from state_cache.store import open_cache, write_cache
from storage.control import source_hash
from storage.files import file_lock
from storage.json_files import write_json
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.runs import CACHE_FOLDER, RunPaths
from storage.shards import LOCAL_PRODUCER, publish_shard
from tasks.preparation import freeze_positions, refresh_positions


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


def test_a_refresh_of_a_run_in_progress_names_no_start_group_that_is_still_played(tmp_path: Path):
    begin_run(tmp_path, "mine", 3)
    stored = layered_settings("laptop", overrides={"run": "mine", "runs_root": tmp_path, "pipeline": {"buffer_depth": 2}})
    paths, step = stored.paths, stored.rollouts.start_groups
    paths.settings.write_text(stored.model_dump_json())
    os.utime(paths.settings, (1000, 1000))

    def named() -> int:
        return refreshed_settings(tmp_path, "mine", 0.3).from_groups

    def publish(first: int, count: int) -> None:
        publish_shard(paths, LOCAL_PRODUCER, first, [], [], {}, next_start_group=first + count)

    publish(step, step)
    assert named() == 3 * step, "what the run has not published by its end comes no more"
    with file_lock(paths.lock):
        with pytest.raises(InputError, match="not trained a step with all its rollouts"):
            named()
        publish(0, step)
        publish(2 * step + 1, step)
        assert named() == 2 * step
        os.utime(paths.ledger / "step-000003.arrow", (900, 900))
        assert named() == 3 * step, "it was recorded before the run was resumed"
        os.utime(paths.ledger / "step-000003.arrow", (1100, 1100))
        publish(2 * step, 1)
        assert named() == 3 * step


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
        lines = [{"step": step, "time": 1000.0 + step - age} for step in (0, 1)]
        text = "\n".join(map(json.dumps, lines))
        (tmp_path / name / "metrics.jsonl").write_text(f'{text}\n{{"step": 2, "ti')
    begin_run(tmp_path, "untrained", 0)
    (tmp_path / "untrained" / "metrics.jsonl").write_text('{"step": 0, "time": 2000.0}\n')
    assert newest_run(tmp_path) == "late", "the other was copied since, and has newer files"


def publish_refresh(root: Path, settings: CacheSettings) -> Path:
    """Publish an empty version as the newest refresh of its settings."""
    write_json(newest_file(root / CACHE_FOLDER, settings), settings.model_dump(mode="json"))
    return write_cache(root / CACHE_FOLDER, settings, [], [])


def test_a_refresh_stays_until_a_newer_one_of_its_settings_replaces_it_and_no_run_names_it(tmp_path: Path):
    root = tmp_path / CACHE_FOLDER
    plain = write_cache(root, CacheSettings(), [], [])
    replaced, used, newest = (
        publish_refresh(tmp_path, CacheSettings(from_run="mine", from_groups=groups)) for groups in (8, 16, 24)
    )
    other = publish_refresh(tmp_path, CacheSettings(seed=1, from_run="mine", from_groups=8))
    begin_run(tmp_path, "mine", 3)
    begin_run(tmp_path, "next", 1, CacheSettings(from_run="mine", from_groups=16))
    (tmp_path / "next" / "settings.json").rename(tmp_path / "next" / "kept")
    (tmp_path / "next" / "settings.json").write_text("{")
    assert drop_unused(root, tmp_path) == [], "a run that cannot be read may name any of them"
    (tmp_path / "next" / "kept").rename(tmp_path / "next" / "settings.json")
    (damaged := root / "v-damaged").mkdir()
    (damaged / "manifest.json").write_text('{"settings": {"from_run": 3}}')
    assert drop_unused(root, tmp_path) == [replaced.name]
    assert {path for path in root.iterdir() if path.is_dir()} == {plain, used, newest, other, damaged}


NEWEST_CACHE = CacheSettings(from_run=NEWEST)


def test_a_run_starts_from_the_newest_refresh_of_its_own_settings(tmp_path: Path):
    root = tmp_path / CACHE_FOLDER
    assert newest_refresh(root, NEWEST_CACHE) == CacheSettings(), "there is none yet"
    first, other = CacheSettings(from_run="b", from_groups=8), CacheSettings(seed=1, from_run="c", from_groups=8)
    publish_refresh(tmp_path, first)
    publish_refresh(tmp_path, other)
    assert newest_refresh(root, NEWEST_CACHE) == first
    newer = CacheSettings(from_run="a", from_groups=4, on_policy_share=0.5)
    (path,) = (publish_refresh(tmp_path, newer),)
    assert newest_refresh(root, NEWEST_CACHE) == newer, "the one that was published last, whatever its name and its groups"
    assert newest_refresh(root, CacheSettings(seed=1, from_run=NEWEST)) == other
    shutil.rmtree(path)
    assert newest_refresh(root, NEWEST_CACHE) == CacheSettings(), "its folder is gone"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"from_run": 7}', '{"seed": 9, "from_run": "b", "from_groups": 8}'])
def test_a_damaged_record_of_the_newest_refresh_is_none(tmp_path: Path, content: str):
    publish_refresh(tmp_path, CacheSettings(from_run="b", from_groups=8))
    newest_file(tmp_path / CACHE_FOLDER, CacheSettings()).write_text(content)
    assert newest_refresh(tmp_path / CACHE_FOLDER, NEWEST_CACHE) == CacheSettings()


def test_a_resumed_run_keeps_the_version_that_it_began_with(tmp_path: Path):
    """Its flow run names the newest refresh still, and a newer one was published since."""
    began, newer = (CacheSettings(from_run="mine", from_groups=groups) for groups in (8, 16))
    publish_refresh(tmp_path, began)
    given = layered_settings("laptop", overrides={"run": "next", "runs_root": tmp_path})
    given = given.model_copy(update={"cache": NEWEST_CACHE})
    assert with_cache_version(given).cache == began
    begin_run(tmp_path, "next", 1, began)
    publish_refresh(tmp_path, newer)
    assert with_cache_version(given, resume=True).cache == began
    assert with_cache_version(given).cache == newer
    plain = given.model_copy(update={"cache": CacheSettings()})
    assert with_cache_version(plain).cache == CacheSettings(), "only a run that asks for it takes it"


def test_a_refresh_names_the_runs_that_started_from_it(tmp_path: Path):
    settings = CacheSettings(from_run="mine", from_groups=8)
    publish_refresh(tmp_path, settings)
    assert "No run has started" in _describe_refresh(tmp_path, settings)[-1]
    begin_run(tmp_path, "mine", 1)
    for name in ("one", "two"):
        begin_run(tmp_path, name, 1, settings)
    assert _describe_refresh(tmp_path, settings)[-1] == "Runs that started from it: one, two."


def test_a_cache_of_a_run_that_is_gone_cannot_be_made(tmp_path: Path):
    settings = CacheSettings(from_run="gone", from_groups=8)
    with pytest.raises(InputError, match="there is no run 'gone'"):
        asyncio.run(_made(tmp_path / CACHE_FOLDER, settings, tmp_path))


def test_where_no_run_has_trained_the_nightly_refresh_says_so_and_builds_nothing(tmp_path: Path, said: list[str]):
    assert asyncio.run(build_state_cache.fn(runs_root=tmp_path, run=NEWEST)) is None
    assert said == [f"no run in '{tmp_path}' has trained a step yet, so there is no state cache to refresh"]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_read_costs_no_run_that_takes_the_refresh(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    settings = CacheSettings(from_run="mine", from_groups=8)
    publish_refresh(tmp_path, settings)
    begin_run(tmp_path, "broken", 1)
    (tmp_path / "broken" / "settings.json").write_text("{")
    monkeypatch.setattr("tasks.artifacts._flow_run_id", uuid4)
    asyncio.run(show_refresh(tmp_path, settings))
    assert len(said) == 1 and "'broken'" in said[0].replace(str(tmp_path / "broken"), "'broken'")


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Build a cache, or refresh that of a run, without Prefect."""
    for task in (freeze_positions, refresh_positions):
        monkeypatch.setattr(f"flows.build_state_cache.{task.fn.__name__}", task.fn)

    def build(settings: CacheSettings | None = None, run: str = "") -> Path:
        path = asyncio.run(build_state_cache.fn(settings, tmp_path, run))
        assert path is not None
        return path

    return build


def test_a_cache_of_a_user_s_bot_that_was_edited_since_is_built_again_unless_a_run_uses_it(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, build: Callable[..., Path]
):
    monkeypatch.syspath_prepend(str(tmp_path))

    def edit(bot: str) -> None:
        (tmp_path / "edited_bot.py").write_text(f"from entente.game.scripted import {bot} as bot")
        monkeypatch.delitem(sys.modules, "edited_bot", raising=False)
        for remembers in (player, source_hash):
            remembers.cache_clear()

    edit("mover")
    settings = CacheSettings(players=("edited_bot:bot",), train_snapshots=8, held_out_snapshots=4)
    first = open_cache(build(settings)).train
    assert open_cache(build(settings)).train == first and not said
    edit("uniform")
    assert open_cache(build(settings)).train != first
    assert len(said) == 1 and "was made from another package 'edited_bot' than the one here" in said[0]
    begin_run(tmp_path, "mine", 1, settings)
    edit("mover")
    mine = settings_of(RunPaths(tmp_path / "mine"))
    for use in (lambda: build(settings), lambda: asyncio.run(prepare_cache(mine.model_copy(update={"run": "next"}), new=True))):
        with pytest.raises(InputError, match="another package 'edited_bot' than the one here, and run 'mine' uses it: choose"):
            use()
    cache = asyncio.run(prepare_cache(mine))
    assert cache.train != first, "a run keeps its positions"
    (cache.path / "train.arrow").write_bytes(b"")
    with pytest.raises(InputError, match=r"train\.arrow is not .* because the package 'edited_bot' is another one now: restore"):
        asyncio.run(prepare_cache(mine))


def test_a_refresh_is_of_the_run_that_has_the_name_now(
    tmp_path: Path, said: list[str], positions, monkeypatch: pytest.MonkeyPatch, build: Callable[..., Path]
):
    plain, train, held_out = CacheSettings(), positions[:5], positions[5:]
    write_cache(tmp_path / CACHE_FOLDER, plain, train, held_out)
    monkeypatch.setattr("tasks.preparation.ProcessPool", ThreadPoolExecutor)

    def begin(first: int) -> None:
        """Make the run again, which reaches these positions."""
        shutil.rmtree(tmp_path / "mine", ignore_errors=True)
        begin_run(tmp_path, "mine", 0, plain)
        paths = RunPaths(tmp_path / "mine").create()
        (paths.shards / "local").mkdir()
        write_ledger(paths, 1, pa.table({each.name: pa.array([first]).cast(each.type) for each in ROWS_SCHEMA}), {})
        reached = [replace(each, game_id=f"mine-{first}", source="policy:0") for each in train]
        monkeypatch.setattr("tasks.preparation._reached", lambda *_: reached)
        monkeypatch.setattr("tasks.preparation.refresh", lambda *_: reached)

    begin(1)
    path = build(run="mine")
    assert build(run="mine") == path and not said
    begin(2)
    assert open_cache(build(run="mine")).train[0].game_id == "mine-2"
    assert len(said) == 1 and f"'{path}' was made from another run 'mine' than the one here" in said[0]
    begin_run(tmp_path, "next", 1, settings := open_cache(path).settings)
    begin(3)
    with pytest.raises(InputError, match="another run 'mine' than the one here, and run 'next' uses it: choose another share"):
        build(run="mine")
    follower = settings_of(RunPaths(tmp_path / "next"))
    assert asyncio.run(prepare_cache(follower.model_copy(update={"run": "later"}), new=True)).settings == settings
    (path / "train.arrow").write_bytes(b"")
    with pytest.raises(InputError, match=r"train\.arrow is not .* because the run 'mine' is another one now: restore the folder"):
        asyncio.run(prepare_cache(follower))
    begin(2)
    monkeypatch.setattr("flows.open_run.build_state_cache", build_state_cache.fn)
    assert asyncio.run(prepare_cache(follower)).train[0].game_id == "mine-2", "it is built again from the same run"


def test_a_refresh_without_a_mark_of_its_run_stays_usable(tmp_path: Path, positions, build: Callable[..., Path]):
    plain, train, held_out = CacheSettings(), positions[:5], positions[5:]
    begin_run(tmp_path, "mine", 0, plain)
    write_ledger(RunPaths(tmp_path / "mine").create(), 1, ROWS_SCHEMA.empty_table(), {})
    settings = refreshed_settings(tmp_path, "mine", 0.25)
    path = write_cache(tmp_path / CACHE_FOLDER, settings, train, held_out)
    assert build(run="mine") == path


def test_the_options_that_a_refresh_prints_name_its_version(tmp_path: Path, positions, monkeypatch, capsys):
    share = 0.3333333333
    settings = CacheSettings(from_run="mine", from_groups=8, on_policy_share=share)
    path = write_cache(tmp_path / CACHE_FOLDER, settings, positions[:5], positions[5:])
    monkeypatch.setattr("entente.cli.cache.run_flow", lambda flow: path)
    begin_run(tmp_path, "mine", 1)
    refresh(run="mine", share=share, runs_root=tmp_path)
    printed = capsys.readouterr().out
    assert f"--cache.from-groups 8 --cache.on-policy-share {share}\n" in printed, "fewer digits are another version"
