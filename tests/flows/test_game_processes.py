"""A training run whose games are played in processes of their own, one of which is killed."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.ipc
import pytest

from storage.runs import RunPaths
from tests.command import Entente, runs

APART = "[pipeline]\nbuffer_depth = 1\nlockstep = true\ndeterministic = false\ngame_processes = 2\n"


def game_processes(parent: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in psutil.Process(parent.pid).children(recursive=True) if runs(child, "rollouts.game_process")]


def first_rows(paths: RunPaths) -> dict[int, dict[str, Any]]:
    """Rows of the first step, which the base model drew, by decision id."""
    shards = [file for file in (paths.shards / "local").glob("*.arrow") if not file.name.endswith(".plies.arrow")]
    rows = [row for file in shards for row in pyarrow.ipc.open_file(file).read_all().to_pylist()]
    return {row["decision_id"]: row for row in rows if row["start_group"] < 2}


@pytest.mark.system
def test_a_run_with_a_killed_game_process_trains_on_the_rows_of_a_run_without(workplace: Entente, trained: Any):
    _, alone, _ = trained
    (workplace.folder / "apart.toml").write_text(APART)
    paths, killed, left = RunPaths(workplace.folder / "runs" / "apart"), 0, list[psutil.Process]()
    words = ("train", "--config", "small.toml", "--config", "apart.toml", "--run", "apart", "--json")
    with workplace.start(*words) as process:
        while process.poll() is None and not killed:
            left = game_processes(process)
            if len(left) == 2:
                left[0].kill()
                killed = left[0].pid
            time.sleep(0.02)
        left += game_processes(process)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert (summary["steps"], summary["orders_rejected"]) == (2, 0)
    assert killed and "game process 1 ended (exit code -9) and is replaced" in err
    rows, expected = first_rows(paths), first_rows(alone)
    assert rows.keys() == expected.keys() and len(rows) > 8
    same = ("seed", "input_ids", "legal_ids", "orders", "centres_gained", "policy_version")
    for name, row in rows.items():
        assert {column: row[column] for column in same} == {column: expected[name][column] for column in same}
        np.testing.assert_allclose(row["behaviour_logprobs"], expected[name]["behaviour_logprobs"], atol=1e-4)
    # In lockstep, one step ahead: the second step trains on its own start groups, and the base model drew them too.
    (second,) = paths.ledger.glob("*/step-000002.arrow")
    ledger = pyarrow.ipc.open_file(second).read_all()
    assert set(ledger["policy_lag"].to_pylist()) == {1}
    figures = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert all(step["memory/games_mib"] > 100 for step in figures if "time/step_s" in step)
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive and Path(paths.games_log).is_file()
