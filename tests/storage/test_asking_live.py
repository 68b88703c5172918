"""A run is asked while it goes on: another process publishes rows, records steps, and appends figures."""

import subprocess
import sys
from pathlib import Path

import pytest

from storage.asking import QUERIES, ask, connect, ready_query
from storage.runs import RunPaths

WRITER = """
import json, random, sys
from dataclasses import replace
from pathlib import Path
from storage.index import Index
from storage.ledger import write_ledger
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.shards import publish_shard
from tests.storage.make_rows import make_shard_rows

paths = RunPaths(Path(sys.argv[1]))
index = Index(paths)
query = SelectionQuery(step=1, policy_version=0, max_policy_lag=2, start_groups=2, seed=0)
for step in range(1, 100_000):
    decisions, plies = make_shard_rows(
        random.Random(step), range(step - 1, step), "busy", 4, policy_version=max(0, step - 2)
    )
    publish_shard(paths, "busy", step - 1, decisions, plies, {})
    index.refresh()
    query = replace(query, step=step, policy_version=step - 1)
    rows = index.select_batch(query).rows
    assert write_ledger(paths, step, rows, {})
    assert len(index.gather(rows).decision_ids) == rows.num_rows
    with paths.metrics.open("a") as figures:
        told = {"time/step_s": 4.0, "time/trainer_wait_s": 1.0, "train/legal_mass_p50": 0.5, "train/legal_mass_p10": 0.1}
        told["rollout/tokens_per_s"] = 9.0
        figures.write(json.dumps({"step": step} | told) + "\\n")
    with paths.devices.open("a") as readings:
        readings.write(json.dumps({"time": 60.0 * step, "device": "0", "utilisation": 0.5}) + "\\n")
    print(step, flush=True)
"""
COUNTS = """
select
    (select count(*) from decisions) as decisions,
    (select count(distinct shard) from decisions) as shards,
    (select sum(n) from groups) as grouped,
    (select count(*) from plies) as plies,
    (select max(step) from batches) as step,
    (select count(*) from refused) as refused
"""


@pytest.mark.system
def test_ready_questions_are_answered_while_a_run_goes_on(paths: RunPaths) -> None:
    assert len(QUERIES) >= 10
    command = [sys.executable, "-c", WRITER, str(paths.root)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, env={"PYTHONPATH": "."}) as writer:
        assert writer.stdout is not None
        try:
            while int(writer.stdout.readline()) < 4:
                pass
            seen = []
            for _ in range(3):
                done = int(writer.stdout.readline())
                with connect(paths.root) as run:
                    (counts,) = ask(run, COUNTS).to_pylist()
                    answers = {name: ask(run, ready_query(name)) for name in QUERIES}
                assert counts["shards"] >= done and counts["step"] >= done and counts["refused"] == 0
                assert counts["decisions"] == counts["grouped"] == 16 * counts["shards"] == 2 * counts["plies"]
                assert {name for name, answer in answers.items() if answer.num_rows == 0} == {"teacher_disagrees"}  # no lessons
                lags = answers["lag_histogram"].to_pylist()
                assert abs(sum(row["share"] for row in lags) - 1) < 1e-9 and {row["policy_lag"] for row in lags} <= {0, 1, 2}
                assert {row["idle_share"] for row in answers["trainer_idle_share"].to_pylist()} == {0.25}
                assert {row["utilisation"] for row in answers["gpu_use"].to_pylist()} == {0.5}
                assert {row["rollout/tokens_per_s"] for row in answers["tokens_per_second"].to_pylist()} == {9}
                by_version = answers["return_by_version_and_power"]
                assert set(by_version["policy_version"].to_pylist()) == set(range(counts["shards"] - 1))
                seen.append(counts["decisions"])
            assert writer.poll() is None, "the run goes on, whoever asks"
            assert seen == sorted(seen)
        finally:
            writer.kill()
