"""However a step is cut into tasks, and however often one is tried, its start groups are played once and are the same."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from entente.rollouts.figures import add_up
from entente.rollouts.groups import GroupRange
from entente.rollouts.settings import RolloutSettings
from storage.index import open_index
from storage.run_sql import connect
from storage.shards import LOCAL_PRODUCER, open_shard, shard_path
from tasks.open_objects import OpenRun
from tasks.train_policy import roll_out_groups, roll_out_probe
from tests.damage import flip
from tests.task_resources import resources_of

STEP, START_GROUPS = 3, 4
FIRST = (STEP - 1) * START_GROUPS


@pytest.fixture
def resources(tmp_path: Path, host, uniform_engine, tokens, positions) -> Callable[[str], OpenRun]:
    """What tasks of a run of this name work with: `resources("run")`."""
    rollouts = RolloutSettings(start_groups=START_GROUPS, forks_per_group=2, horizon_years=1)
    return lambda name: resources_of(tmp_path / name, positions, rollouts, host=host, engine=uniform_engine(), tokens=tokens)


def play(resources: OpenRun, *tasks: tuple[int, int]) -> list[Any]:
    """Roll out tasks of (first start group, count), one after the other, without Prefect; their reports."""
    return [asyncio.run(roll_out_groups.fn(resources, GroupRange(first, count, STEP))) for first, count in tasks]


def rows(resources: OpenRun) -> list[tuple[Any, ...]]:
    told = "decision_id, snapshot_id, start_group, fork, phase_index, power, seed, n_completion, centres_gained"
    with connect(resources.paths.root) as run:
        return run.sql(f"select {told} from decisions order by decision_id").fetchall()


def test_a_step_plays_the_same_however_it_is_cut_into_tasks(resources: Callable[[str], OpenRun]):
    whole, cut = resources("whole"), resources("cut")
    (report,) = play(whole, (FIRST, START_GROUPS))
    reports = play(cut, (FIRST + 2, 2), (FIRST, 1), (FIRST + 1, 1))
    assert rows(cut) == rows(whole)
    assert {row[2] for row in rows(whole)} == set(range(FIRST, FIRST + START_GROUPS))
    assert report["decisions"] == add_up(reports)["decisions"] == len(rows(whole))
    assert report["start_groups"] == add_up(reports)["start_groups"] == START_GROUPS


def test_a_task_tried_again_after_its_shard_was_published_plays_nothing(resources: Callable[[str], OpenRun]):
    run = resources("run")
    first, second = play(run, (FIRST, 2), (FIRST, 2))
    played = len(run.engine.requests)  # type: ignore[attr-defined]
    assert played == first["decisions"] == len(rows(run)) > 0
    assert second == first, "what stands is reported from its shard"


def test_a_report_counts_the_tokens_of_its_own_rows(resources: Callable[[str], OpenRun]):
    """Against a loop over the rows as plain lists; in several shards, whose columns lie in several chunks."""
    run = resources("run")
    play(run, (FIRST, 1), (FIRST + 1, 2))
    (report,) = play(run, (FIRST, START_GROUPS))
    prompt = completion = forced = 0
    for shard in (shard_path(run.paths, LOCAL_PRODUCER, FIRST + place) for place in (0, 1, 3)):
        for row in open_shard(shard).to_pylist():
            prompt += row["prompt_len"]
            completion += len(row["input_ids"]) - row["prompt_len"]
            forced += sum(after - before == 1 for before, after in pairwise(row["legal_offsets"]))
    assert 0 < forced < completion and report["cached_tokens"] == 0
    assert [report[f"{name}_tokens"] for name in ("prompt", "completion", "forced")] == [prompt, completion, forced]


def test_a_task_plays_only_what_no_shard_holds_and_a_damaged_shard_again(resources: Callable[[str], OpenRun]):
    run, whole = resources("run"), resources("whole")
    play(run, (FIRST + 1, 2))
    play(whole, (FIRST, START_GROUPS))
    (report,) = play(run, (FIRST, START_GROUPS))
    assert rows(run) == rows(whole) and report["decisions"] == len(rows(whole)) and report["set_aside"] == 0
    shard = shard_path(run.paths, LOCAL_PRODUCER, FIRST + 1)
    damaged = flip(shard).read_bytes()
    (report,) = play(run, (FIRST, START_GROUPS))
    assert rows(run) == rows(whole) and report["set_aside"] == 1
    asides = [aside.read_bytes() for aside in shard.parent.glob(".*.damaged-*")]
    assert len(asides) == 2 and damaged in asides, "kept with its phases, to be looked at"


class Ledger:
    """Stands when the test says so, and counts who looks."""

    def __init__(self) -> None:
        self.stands, self.looks = False, 0

    def exists(self) -> bool:
        self.looks += 1
        return self.stands


def test_what_is_played_ahead_is_published_once_the_step_before_has_chosen_its_rows(resources: Callable[[str], OpenRun]):
    run, ledger = resources("run"), Ledger()
    shard = shard_path(run.paths, LOCAL_PRODUCER, FIRST)

    async def scene() -> None:
        playing = asyncio.create_task(roll_out_groups.fn(run, GroupRange(FIRST, 1, STEP, ledger)))  # type: ignore[arg-type]
        while ledger.looks < 5 and not playing.done():
            await asyncio.sleep(0.02)
        assert run.engine.requests and not shard.exists() and not playing.done()  # type: ignore[attr-defined]
        ledger.stands = True
        await playing

    asyncio.run(scene())
    assert shard.exists()


def test_a_probe_holds_rows_to_compare_on_and_none_that_a_step_could_train_on(resources: Callable[[str], OpenRun]):
    run = resources("run")
    asyncio.run(roll_out_probe.fn(run, 4))
    asyncio.run(roll_out_probe.fn(run, 4))
    index = open_index(run.paths)
    assert index.fresh_rows(policy_version=0, limit=512).num_rows == len(run.engine.requests) > 1  # type: ignore[attr-defined]
    rows, counts = index.select_batch(1, policy_version=0, start_groups=8)
    assert rows.num_rows == 0 and counts["unusable"] > 1
    before = len(run.engine.requests)  # type: ignore[attr-defined]
    asyncio.run(roll_out_probe.fn(run, 400))
    index.refresh()
    sampled = index.fresh_rows(policy_version=0, limit=512).num_rows
    assert sampled == len(run.engine.requests) > before, "a probe of a much later version is found as soon"  # type: ignore[attr-defined]


def test_the_process_of_a_flow_does_without_duckdb_and_loads_no_engine_before_it_needs_one():
    """Beside vLLM DuckDB's bindings fill the terminal with complaints when the process ends; the trainer's process has it."""
    heavy = ("duckdb", "torch", "vllm", "wandb")
    program = f"import sys, flows.train_policy; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "[]", done.stderr
