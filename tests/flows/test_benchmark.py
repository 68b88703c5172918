"""The benchmark's deployment: figures beside a baseline, which is the first outcome on this machine."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from flows.benchmark import BASELINE_FOLDER, benchmark, compared
from flows.build_state_cache import REFRESHED

ROOT = Path(__file__).resolve().parents[2]


def test_each_figure_stands_beside_the_baseline_with_its_change_and_its_target():
    outcome = {
        "metrics": {"fork_ms": 0.12, "phases_per_s": 90.0, "new": 1.0},
        "targets": {"fork_ms": {"at_most": 0.1}, "phases_per_s": {"at_least": 50.0}},
    }
    rows = {row["figure"]: row for row in compared(outcome, {"metrics": {"fork_ms": 0.1, "phases_per_s": 100.0}})}
    assert (rows["fork_ms"]["change"], rows["fork_ms"][""]) == ("+20.0%", "missed")
    assert (rows["phases_per_s"]["change"], rows["phases_per_s"][""]) == ("-10.0%", "holds")
    assert (rows["new"]["change"], rows["new"]["baseline"], rows["new"][""]) == ("", "", "")


def test_the_event_of_a_refreshed_cache_is_the_one_that_the_deployment_waits_for():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (trigger,) = (trigger for each in deployments for trigger in each.get("triggers", []))
    assert trigger["expect"] == [REFRESHED]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_the_first_outcome_is_the_baseline_and_stays_it(prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    first = asyncio.run(benchmark(name="game", runs_root=tmp_path))
    assert first["benchmark"] == "game" and set(first["changes"].values()) <= {"", "+0.0%"}
    baseline = tmp_path / BASELINE_FOLDER / "game.json"
    lower = json.loads(baseline.read_text())
    lower["metrics"]["phases"] /= 2  # a count: it is the same in every run
    baseline.write_text(json.dumps(lower))
    assert asyncio.run(benchmark(name="game", runs_root=tmp_path))["changes"]["phases"] == "+100.0%"
    assert json.loads(baseline.read_text()) == lower
