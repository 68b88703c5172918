"""A run that is killed, however often and whenever, goes on with --resume and ends as if nothing had happened."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from entente.settings.layers import settings_of
from flows.train_policy import train_policy
from storage.runs import RunPaths
from tests.chaos.audit_run import audit, decisions
from tests.shard_rows import read_rows, shard_files


class Killer:
    """Starts `entente train` again and again on one run, and kills it."""

    def __init__(self, workplace: Any, run: str, steps: int, *more: str) -> None:
        self._workplace, self._steps, self._more = workplace, steps, more
        self.paths = RunPaths(workplace.folder / "runs" / run)
        self._log = workplace.folder / f"{run}.log"

    def words(self) -> list[str]:
        begun = self.paths.settings.is_file()
        own = ["--resume"] if begun else ["--config", "small.toml", "--steps", str(self._steps), *self._more]
        return ["train", "--run", self.paths.root.name, *own]

    def recorded(self) -> int:
        """Steps whose ledger stands."""
        return len(list(self.paths.ledger.rglob("step-*.arrow")))

    def kill_when(self, *, step: int | None = None, file: Path | None = None, then_s: float) -> None:
        """Kill -9 the command `then_s` seconds after it has recorded `step`, or written `file` (None: after its start); see that
        all ends."""
        process = self._workplace.start(*self.words())
        family: list[psutil.Process] = []
        try:
            while process.poll() is None and step is not None and self.recorded() < step:
                time.sleep(0.02)
            while process.poll() is None and file is not None and not file.exists():
                time.sleep(0.02)
            time.sleep(then_s)
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
            _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == [], "no process outlives the command"

    def finish(self) -> dict[str, Any]:
        """Let the run come to its end; its summary."""
        done = self._workplace.process(*self.words(), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def weights(paths: RunPaths, version: int) -> bytes:
    return (paths.adapter(version) / "adapter_model.safetensors").read_bytes()


def opponents(paths: RunPaths) -> set[str]:
    """Everybody who played against the policy."""
    met = {row["opponents"] for row in read_rows(*shard_files(paths))}
    return {seat.partition("=")[2] for text in met for seat in text.split(",")}


OVERLAPPED = ("--pipeline.buffer-depth", "1")
LEAGUE = ("--rollouts.opponents", "random,league*3", "--rollouts.opponents-by", "seat")


@pytest.fixture(scope="module")
def killed(workplace: Any, trained: Any) -> Iterator[tuple[RunPaths, dict[str, Any]]]:
    """A run of four steps against its league, rollouts beside training, killed twice: in one of its steps, and while it was
    starting."""
    rng = random.Random()
    killer = Killer(workplace, "killed", 4, *OVERLAPPED, *LEAGUE)
    killer.kill_when(step=2, then_s=rng.uniform(0, 0.6))
    killer.kill_when(then_s=rng.uniform(1, 8))
    yield killer.paths, killer.finish()


@pytest.mark.system
def test_a_run_that_was_killed_twice_ends_complete_and_nothing_was_trained_twice_or_lost(killed):
    paths, summary = killed
    audit(paths, steps=4, max_lag=1)
    own = [shard for shard in decisions(paths)["shard"].to_pylist() if shard.startswith("local/")]
    assert summary["steps"] == 4 and summary["decisions"] == len(own), "a resume's probes are not counted"


@pytest.mark.system
def test_it_ends_with_the_very_weights_of_a_run_that_nobody_killed(killed, workplace):
    """Its rollouts are of the version before the one in training, also where it goes on; a probe on the way changes nothing.
    Members of the league take turns in the engine, and whose turn is first does not depend on what was drawn before a kill."""
    whole = Killer(workplace, "beside", 4, *OVERLAPPED, *LEAGUE)
    summary = whole.finish()
    leagues = sorted((whole.paths.league / "local").iterdir())
    assert [(killed[0].league / "local" / file.name).read_bytes() for file in leagues] == [file.read_bytes() for file in leagues]
    assert weights(killed[0], 4) == weights(whole.paths, 4)
    assert summary["max_policy_lag_seen"] == 1
    for paths in (whole.paths, killed[0]):
        rows = [row for row in decisions(paths).to_pylist() if row["shard"].startswith("local/")]
        sampled_by = {(row["start_group"] // 2 + 1, row["policy_version"]) for row in rows}
        behind = {(1, 0), *((step, step - 2) for step in range(2, 5))}
        assert sampled_by == behind, "two start groups a step, and the version that drew them"
        assert {"random", "policy:0"} <= opponents(paths), "or nobody of the league had played"


def test_a_finished_run_is_not_run_again_and_writes_the_report_that_a_kill_left_unwritten(
    stored_run: RunPaths, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    report = stored_run.root / "report.html"
    stored_run.summary.touch()
    written = []

    async def write(paths: RunPaths) -> None:
        report.touch()
        written.append(paths.root.name)

    monkeypatch.setattr("flows.train_policy.write_report_page", write)
    stored = settings_of(stored_run)
    settings = stored.model_copy(update={"telemetry": stored.telemetry.model_copy(update={"report": True})})
    summary = json.loads(stored_run.summary.read_text()) | {"run": str(stored_run.root)}
    metrics = stored_run.metrics.read_bytes()
    for _ in range(2):
        assert asyncio.run(train_policy.fn(settings, resume=True)) == summary
        assert len(written) == 1 and "has done its 2 steps: raise --steps" in said[-1]
    assert stored_run.metrics.read_bytes() == metrics
    os.utime(report, (0, 0))  # of fewer steps
    asyncio.run(train_policy.fn(settings, resume=True))
    assert len(written) == 2


@pytest.mark.system
def test_a_run_that_is_told_to_end_leaves_nothing_behind_and_says_how_to_go_on(workplace, trained):
    """With a Prefect server of its own, as a user has it."""
    run = "stopped"
    process = workplace.start("train", "--config", "small.toml", "--run", run, "--steps", "40", PREFECT_API_URL="")
    paths = RunPaths(workplace.folder / "runs" / run)
    try:
        while process.poll() is None and not list(paths.ledger.rglob("step-*.arrow")):
            time.sleep(0.05)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "the trainer and the server"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143 and out == ""
    hint = f"finished steps are kept; continue with: entente train --run {run} --resume"
    assert err.splitlines()[-2:] == [hint, "entente: ended by SIGTERM"], err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []


@pytest.mark.slow
def test_thirty_kills_at_random_moments_end_in_a_complete_run(workplace, trained):
    rng, killer = random.Random(), Killer(workplace, "thirty", steps=60)
    for number in range(30):
        if number % 5 == 0:
            killer.kill_when(then_s=rng.uniform(0.2, 12))
        else:
            killer.kill_when(step=min(58, killer.recorded() + rng.choice([1, 2, 3])), then_s=rng.uniform(0, 1.0))
    killer.finish()
    audit(killer.paths, steps=60)
