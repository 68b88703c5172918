"""Claims about the tuner: the grid, what is chosen, what is found again, and the requests of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoding.legal_table import END
from decoding.thinking import ThoughtRule
from pipeline.run_settings import RunSettings, layered_settings
from pipeline.tune_engine import NOISE, TuneSettings, TuningPlan, choose, plan_tuning, table_rows
from pipeline.tuning_candidate import chain_table, recorded_rows
from records.policy_version import PolicyVersion
from storage.runs import RunPaths
from storage.shards import open_shard
from telemetry.errors import DataError, InputError


@pytest.fixture
def base(tmp_path: Path) -> RunSettings:
    return layered_settings("laptop", (), {"runs_root": tmp_path})


def grid(base: RunSettings, **axes: Any) -> TuningPlan:
    return plan_tuning("mine", base, TuneSettings.model_validate({"max_sequences": (), "max_batched_tokens": ()} | axes), None)


def figures(rate: float, *, p99: float = 1000.0, hit: float = 0.5, spread: float = 0.01) -> dict[str, Any]:
    return {
        "decisions_per_s": rate,
        "tokens_per_s": rate,
        "latency_ms_p99": p99,
        "first_token_ms": 1.0,
        "cache_hit": hit,
        "spread": spread,
    }


def test_the_grid_holds_every_combination_and_the_current_settings_first_and_once(base: RunSettings):
    plan = grid(base, max_sequences=(128, 256, 512), max_batched_tokens=(4096, 8192), concurrency=(64, 128))
    assert len(plan.candidates) == 12 and [each.current for each in plan.candidates] == [True] + [False] * 11
    assert plan.varied == ["max_sequences", "max_batched_tokens", "max_in_flight"]
    beside = grid(base, max_sequences=(256,))
    assert [each.settings.max_sequences for each in beside.candidates] == [base.inference.max_sequences, 256]


def test_figures_are_found_again_for_the_same_settings_adapter_and_requests_only(base: RunSettings):
    plan = grid(base, max_sequences=(256,))
    plan.file(plan.candidates[1]).parent.mkdir(parents=True)
    plan.file(plan.candidates[0]).write_text("{half of")
    plan.file(plan.candidates[1]).write_text(json.dumps(figures(5.0)))
    larger = grid(base, max_sequences=(64, 256), max_batched_tokens=(2048, 4096))
    assert [each.settings.max_sequences for each in larger.measured()] == [256] and len(plan.measured()) == 1
    adapter = PolicyVersion(version=3, adapter_hash="ab", adapter=Path("a"))
    assert replace(plan, policy=adapter).measured() == grid(base, max_sequences=(256,), rounds=3).measured() == {}


def test_what_is_chosen_is_the_fastest_within_latency_and_cache_hits(base: RunSettings):
    plan = grid(base, max_sequences=(16, 32, 64, 256))
    current, slow, late, cold, best = plan.candidates
    found = {
        current: figures(100),
        slow: figures(50),
        late: figures(400, p99=13_001),
        cold: figures(400, hit=0.29),
        best: figures(200),
    }
    chosen, _ = choose(found, plan.tuning)
    assert chosen is best
    del found[slow]
    rows = table_rows(plan, found, {slow: "it died"}, chosen)
    assert [row["note"] for row in rows] == ["misses", "misses", "chosen", "", "it died"]
    assert choose({late: found[late]}, plan.tuning)[0] is None and choose({}, plan.tuning)[0] is None


@pytest.mark.parametrize(
    ("rate", "spread", "stays"),
    [
        pytest.param(100 * (1 + NOISE / 2), 0.0, True, id="hardly faster"),
        pytest.param(130.0, 0.4, True, id="faster by less than passes differ"),
        pytest.param(130.0, 0.1, False, id="faster by more"),
    ],
)
def test_the_current_settings_give_way_only_to_a_gain_beyond_noise(base: RunSettings, rate: float, spread: float, stays: bool):
    current, other = grid(base, max_sequences=(64,)).candidates
    chosen, _ = choose({current: figures(100), other: figures(rate, spread=spread)}, TuneSettings())
    assert (chosen is current) is stays


def test_a_chain_allows_what_was_recorded_and_every_draw_has_the_same_length():
    table = chain_table([4, 7, 2, 5, 2], [0, 3, 4, 5], 2)
    assert [table.allowed(node).tolist() for node in (0, 1, 2)] == [[4, 7], [5], [2]] and table.longest == 3
    assert table.advance(table.advance(table.advance(0, 7), 5), 2) == END
    with pytest.raises(DataError, match="of another model"):
        chain_table([4, 7, 5], [0, 2, 3], 2)


def test_a_recorded_thought_becomes_a_thought_of_as_many_tokens():
    """Ids below 9 but for the end mark 2, twice; then the end of the thought, 6; then 4 or 7."""
    table = chain_table([-3, 9, -3, 9, 6, 4, 7, 2], [0, 2, 4, 5, 7, 8], 2)
    assert table.longest == 5 and table.is_sound and table.thought == ThoughtRule(budget=2, end=9, excluded=2)
    state = table.start
    for token in (8, 0, 6, 7, 2):
        state = table.advance(state, token)
    assert state == END


def test_requests_of_a_run_are_its_newest_prompts_and_masks_ply_by_ply(trained: Any):
    _, paths, _ = trained
    rows = recorded_rows(paths, 10_000)
    stored = [open_shard(path) for path in sorted(paths.shards.glob("*/*.arrow")) if path.stem.isdigit()]
    by_seed = {row["seed"]: row for table in stored for row in table.to_pylist()}
    assert len(rows) == sum(table.num_rows for table in stored)
    for row in rows:
        other = by_seed[row["seed"]]
        assert row["prompt_ids"] == other["input_ids"][: other["prompt_len"]] and row["legal_ids"] == other["legal_ids"]
        assert np.array_equal(row["legal_offsets"], other["legal_offsets"])
    newest = max(stored, key=lambda table: max(table["start_group"].to_pylist()))
    plies = [by_seed[row["seed"]]["ply"] for row in rows[: newest.num_rows]]
    assert plies == sorted(plies), "the newest shard comes first, each of its plies before the next"
    with pytest.raises(InputError, match="has no decisions to tune on"):
        recorded_rows(RunPaths(paths.root.parent / "nobody"), 6)
