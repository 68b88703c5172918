"""Nothing that a resumed run, a score or a reader may still need ever goes; the rest does, by name and age alone."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from entente.telemetry.errors import DataError
from storage import retention
from storage.files import name_aside, set_aside
from storage.ledger import ROWS_SCHEMA, write_ledger
from storage.retention import (
    RetentionFacts,
    RetentionSettings,
    adapters_to_keep,
    drop_old_adapters,
    removable_in_run,
    remove,
)
from storage.runs import RunPaths

TIGHT = RetentionSettings(keep_adapters=1)


@pytest.fixture
def by_age(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> RetentionSettings:
    """Of the run nothing is too many, so age alone decides."""
    monkeypatch.setattr("storage.retention.RESTING_CHECKPOINTS", 6)
    return RetentionSettings()


HOUR = 3600.0
NEVER = 999_999_999
"""A process number that no system hands out."""


def facts_of(adapters: range, **more: set[int]) -> RetentionFacts:
    empty: dict[str, set[int]] = {"checkpoints": set(), "replayed": set(), "scored": set()}
    return RetentionFacts(adapters=frozenset(adapters), **{name: frozenset(those) for name, those in (empty | more).items()})


@pytest.mark.parametrize(
    ("facts", "settings", "kept"),
    [
        pytest.param(facts_of(range(1, 10)), {}, {9}, id="the newest"),
        pytest.param(facts_of(range(1, 10)), {"keep_adapters": 3}, {7, 8, 9}, id="the newest ones"),
        pytest.param(facts_of(range(24, 52)), {}, {25, 50, 51}, id="milestones"),
        pytest.param(facts_of(range(1, 10), scored={0, 2}), {}, {2, 9}, id="what was scored"),
        pytest.param(facts_of(range(1, 10), league={4}), {}, {4, 9}, id="the league"),
        pytest.param(facts_of(range(1, 10), replayed={5, 6}), {}, {5, 6, 9}, id="what drew rows that may be trained again"),
        pytest.param(facts_of(range(1, 10), checkpoints={3, 7}), {}, {3, 4, 5, 6, 7, 8, 9}, id="from the oldest checkpoint on"),
        pytest.param(facts_of(range(1, 1), scored={3}, checkpoints={2}), {}, set(), id="nothing that is not there"),
    ],
)
def test_an_adapter_stays_while_anything_may_need_it(facts: RetentionFacts, settings: dict[str, int], kept: set[int]):
    assert adapters_to_keep(facts, TIGHT.model_copy(update=settings)) == kept


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Six steps: an adapter and a checkpoint each; the ledger of step n has rows of versions n - 2 and n - 1."""
    paths = RunPaths(tmp_path / "mine").create()
    paths.settings.write_text("{}")
    for step in range(1, 7):
        for folder in (paths.adapter(step), paths.checkpoint(step)):
            folder.mkdir()
            (folder / "manifest.json").write_text("{}")
            (folder / "weights").write_bytes(b"\0" * 1000)
        versions = [max(0, step - 2), step - 1]
        rows = {field.name: ["" if field.type == "string" else 0] * 2 for field in ROWS_SCHEMA}
        assert write_ledger(paths, step, pa.table(rows | {"policy_version": versions}, schema=ROWS_SCHEMA), {})
    shard = paths.shards / "local"
    shard.mkdir()
    (shard / "000000.arrow").write_bytes(b"rows")
    (paths.scores / "base.json").write_text(json.dumps({"policy_version": 0}))
    (paths.scores / "middle.json").write_text(json.dumps({"policy_version": 2}))
    return paths


def gone(paths: RunPaths, settings: RetentionSettings = TIGHT, now: float | None = None) -> set[str]:
    """What would go, by its path below the run."""
    return {str(found.path.relative_to(paths.root)) for found in removable_in_run(paths, settings, now)}


def test_what_a_resumed_run_or_a_score_needs_stays_and_the_rest_goes(run: RunPaths):
    # Two checkpoints stay: 5 and 6. Step 6 may be trained again: its rows are of versions 4 and 5. Version 2 was scored.
    assert gone(run) == {
        *(f"adapters/v00000{version}" for version in (1, 3)),
        *(f"checkpoints/step_00000{step}" for step in (1, 2, 3, 4)),
    }
    for found in removable_in_run(run, TIGHT):
        remove(found)
    assert gone(run) == set()
    assert {path.name for path in run.adapters.iterdir()} == {"v000002", "v000004", "v000005", "v000006"}
    assert {path.name for path in run.checkpoints.iterdir()} == {"step_000005", "step_000006"}
    assert len(list(run.ledger.iterdir())) == 6 and (run.shards / "local" / "000000.arrow").exists()


def test_a_version_on_the_track_of_strength_or_in_the_league_stays(run: RunPaths, monkeypatch: pytest.MonkeyPatch):
    assert {"adapters/v000001", "adapters/v000003"} <= gone(run)
    (run.scores / "track").mkdir()
    (run.scores / "track" / "v000001.json").write_text(json.dumps({"policy_version": 1}))
    assert "adapters/v000001" not in gone(run)
    monkeypatch.setattr("storage.retention.LEAGUE_EVERY", 3)
    run.settings.write_text(json.dumps({"rollouts": {"opponents": "league*2,hold"}}))
    assert "adapters/v000003" not in gone(run), "it may be a member"


def test_a_checkpoint_without_its_manifest_is_a_remnant_and_holds_nothing_back(run: RunPaths):
    (run.checkpoint(6) / "manifest.json").unlink()
    assert "checkpoints/step_000006" in gone(run)
    assert "checkpoints/step_000005" not in gone(run), "the newest whole one"


@pytest.mark.parametrize("damage", ["ledger", "score"])
def test_where_nobody_can_say_what_is_needed_nothing_goes(run: RunPaths, damage: str):
    file = run.ledger / "step-000006.arrow" if damage == "ledger" else run.scores / "middle.json"
    if damage == "ledger":  # the checkpoint of its own step is gone, so it may be trained again
        for file_of in run.checkpoint(6).iterdir():
            file_of.unlink()
        run.checkpoint(6).rmdir()
    file.write_bytes(b"torn")
    with pytest.raises(DataError, match=file.name):
        removable_in_run(run, TIGHT)
    with pytest.raises(DataError, match=file.name):
        drop_old_adapters(run, TIGHT)


def test_a_version_that_is_published_meanwhile_stays(run: RunPaths, monkeypatch: pytest.MonkeyPatch):
    known = retention.retention_facts

    def published_meanwhile(*asked: Any) -> retention.RetentionFacts:
        facts = known(*asked)
        make_folder(run.adapter(7))
        return facts

    monkeypatch.setattr(retention, "retention_facts", published_meanwhile)
    drop_old_adapters(run, TIGHT)
    assert run.adapter(7).is_dir()


def make_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    return path


def make_folder(path: Path) -> Path:
    make_file(path / "inside")
    return path


def aside_of_dead(final: Path) -> Path:
    """As `name_aside` names it, in a process that has ended."""
    return final.with_name(name_aside(final).name.replace(f".{os.getpid()}-", f".{NEVER}-"))


LEFT: dict[str, Callable[[RunPaths], Path]] = {
    "adapter": lambda run: make_folder(aside_of_dead(run.adapter(7))),
    "shard": lambda run: make_file(aside_of_dead(run.shards / "local" / "000004.arrow")),
    "summary": lambda run: make_file(aside_of_dead(run.summary)),
    "metrics": lambda run: make_file(run.root / ".metrics.jsonl.tmp"),
    "checkpoint": lambda run: make_folder(run.checkpoints / ".step_000007.writing"),
    "score of a version": lambda run: make_file(aside_of_dead(run.track / "v000010.json")),
    "match": lambda run: make_file(aside_of_dead(run.matches / "base-newest.json")),
    "league": lambda run: make_file(aside_of_dead(run.league / "local" / "000012.json")),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_a_killed_process_left_goes_after_an_hour_not_before(run: RunPaths, kind: str, by_age: RetentionSettings):
    left = LEFT[kind](run)
    assert gone(run, by_age) == set()
    assert gone(run, by_age, time.time() + 0.9 * HOUR) == set()
    assert gone(run, by_age, time.time() + 1.1 * HOUR) == {str(left.relative_to(run.root))}


def test_what_a_living_process_is_making_stays_however_long_it_takes(
    run: RunPaths, by_age: RetentionSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where /proc hides the processes of other users (hidepid)."""
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    make_file(name_aside(run.summary))
    assert gone(run, by_age, time.time() + 50 * HOUR) == set()


def test_what_was_set_aside_as_damaged_stays_for_its_days(run: RunPaths, by_age: RetentionSettings):
    aside = set_aside(run.shards / "local" / "000000.arrow")
    assert gone(run, by_age, time.time() + 29 * 24 * HOUR) == set()
    assert gone(run, by_age, time.time() + 31 * 24 * HOUR) == {str(aside.relative_to(run.root))}


def test_only_w_and_b_s_own_run_folders_go_and_only_when_they_are_old(run: RunPaths, by_age: RetentionSettings):
    kept = [make_folder(run.root / "wandb" / name) for name in ("mine", "run-today", "settings")]
    old = [
        make_folder(run.root / "wandb" / name)
        for name in ("offline-run-20260101_120000-ab12cd34", "run-20260101_120000-ab12cd34")
    ]
    (run.root / "wandb" / "latest-run").symlink_to(old[0], target_is_directory=True)
    assert gone(run, by_age) == set()
    assert gone(run, by_age, time.time() + 31 * 24 * HOUR) == {str(each.relative_to(run.root)) for each in old}
    assert all(each.exists() for each in kept)


@pytest.mark.parametrize(
    "name",
    [
        "adapters/v000001.bak",
        "checkpoints/step_000001_copy",
        "shards/local/notes.arrow.tmp",
        ".notes.damaged-by-hand",
    ],
)
def test_nothing_that_someone_else_named_ever_goes(run: RunPaths, name: str):
    make_file(run.root / name)
    assert name not in gone(run, TIGHT, time.time() + 1000 * 24 * HOUR)


def test_links_are_neither_followed_nor_removed(run: RunPaths, tmp_path: Path):
    treasure = make_folder(tmp_path / "elsewhere" / "v000000")
    (run.adapters / "v000000").symlink_to(treasure, target_is_directory=True)
    (run.checkpoints / "step_000000").symlink_to(treasure, target_is_directory=True)
    (run.adapter(1) / "weights").unlink()
    (run.adapter(1) / "weights").symlink_to(treasure / "inside")
    (run.root / "wandb").symlink_to(make_folder(tmp_path / "elsewhere" / "wandb" / "run-20260101_120000-ab12cd34").parent)
    for found in removable_in_run(run, TIGHT, time.time() + 1000 * 24 * HOUR):
        assert found.path.name not in {"v000000", "step_000000"} and "wandb" not in found.path.parts
        if found.path == run.adapter(1):
            assert found.size == 2, "the manifest alone"
        remove(found)
    assert not run.adapter(1).exists() and (run.adapters / "v000000").is_symlink()
    assert (treasure / "inside").read_bytes() == b"half"
    assert len(list((tmp_path / "elsewhere").rglob("*"))) == 5


def test_a_removed_folder_loses_its_name_before_its_first_file(run: RunPaths, monkeypatch: pytest.MonkeyPatch):
    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("storage.files.shutil.rmtree", killed)
    old = next(found for found in removable_in_run(run, TIGHT) if found.path == run.adapter(1))
    with pytest.raises(KeyboardInterrupt):
        remove(old)
    assert not run.adapter(1).exists()
    (left,) = (path for path in run.adapters.iterdir() if path.name.startswith("."))
    assert {path.name for path in left.iterdir()} == {"manifest.json", "weights"}, "whole, under a name that no reader considers"
