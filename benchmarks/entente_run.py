"""`e2e`: runs `entente train` as a process, and collects the figures of its steps and the CPU seconds of its process tree.

CPU seconds are read when a step's line appears in the run's metrics; all other figures come from the run's files."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from benchmarks.outcome import Outcome
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError, TrainingError
from entente.telemetry.progress import reporter
from storage.ledger import ledgers_after
from storage.runs import RunPaths

_POLL_S = 0.05
_ROOT = Path(__file__).resolve().parents[1]
"""Folder of this package: a clone, or the environment's site-packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    steps: list[dict[str, float]]
    cpu_s: list[float]
    """CPU seconds of the process tree from the start to each step."""
    summary: dict[str, Any]
    lags: list[int]

    def settled(self, name: str) -> list[float]:
        """A metric of all steps except the first, the warm-up."""
        return [step.get(name, 0.0) for step in self.steps[1:]]

    @property
    def cpu_a_step(self) -> float:
        """Mean CPU seconds per step over all processes, without the first step."""
        return (self.cpu_s[-1] - self.cpu_s[0]) / max(1, len(self.cpu_s) - 1)


def run_entente(
    arguments: Sequence[str],
    runs_root: Path,
    run: str,
    *,
    timeout_s: float = 1800.0,
    alone_in: Path | None = None,
) -> RunFigures:
    """Run `entente train` to its end. `alone_in`: working directory of a run with a separate Prefect database; None: the current
    directory and Prefect profile. Raises TrainingError with the last log line if the run failed or took too long."""
    paths, log = RunPaths(runs_root / run), runs_root / f".{run}.log"
    command, environment = train_command(["--json", *arguments], runs_root, run, alone=alone_in is not None)
    runs_root.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stderr:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, cwd=alone_in)
        try:
            cpu_s = _watch(child, paths.metrics, time.monotonic() + timeout_s)
            out = child.communicate()[0]
        except BaseException:
            child.terminate()
            raise
    lines = out.strip().splitlines()
    if child.returncode or not lines:
        last = log.read_text().strip().splitlines()[-1:] or ["nothing was printed"]
        raise TrainingError(f"`entente train` ended with {child.returncode}: {last[0]}; its log is {log}")
    steps = [figures for figures in _lines(paths.metrics) if figures.get("time/step_s")]
    log.unlink()
    return RunFigures(steps=steps, cpu_s=cpu_s, summary=json.loads(lines[-1]), lags=_lags(paths))


@contextmanager
def short_run(settings: RunSettings, arguments: Sequence[str], steps: int, *more: str) -> Iterator[tuple[RunFigures, RunPaths]]:
    """Figures and folder of a run with `steps` steps; removes the folder afterwards. `arguments` are those of `entente train` for
    `settings`, followed by `more`."""
    name = f"bench-{os.getpid()}-{time.time_ns()}"
    words = ["--steps", str(steps), "--seed", str(settings.seed), "--evaluation.positions", "2", *more]
    try:
        yield run_entente([*arguments, *words], settings.runs_root, name), RunPaths(settings.runs_root / name)
    finally:
        shutil.rmtree(settings.runs_root / name, ignore_errors=True)


def train_command(arguments: Sequence[str], runs_root: Path, run: str, *, alone: bool) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of `entente train`; `alone`: without this environment's Prefect variables."""
    command = [sys.executable, "-m", "entente.cli.main", "train", "--run", run, "--runs-root", str(runs_root), *arguments]
    unset = ("OMP_NUM_THREADS", *(("PREFECT_API_URL", "PREFECT_HOME") if alone else ()))
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    # Only these: vLLM's server, of another environment, inherits the variable and must not import this one's packages.
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    clone = [str(_ROOT)] if (_ROOT / "pyproject.toml").is_file() else []
    return command, environment | {"PYTHONPATH": os.pathsep.join([*clone, *paths])}


def _watch(child: "subprocess.Popen[str]", metrics: Path, until: float) -> list[float]:
    seen: list[float] = []
    written = _new_lines(metrics)
    while child.poll() is None:
        if time.monotonic() > until:
            child.terminate()
            child.wait(timeout=60)
            break
        if steps := sum(1 for figures in next(written) if figures.get("time/step_s")):
            seen += [tree_cpu_s(child.pid)] * steps
        time.sleep(_POLL_S)
    return seen


def _new_lines(file: Path) -> Iterator[list[dict[str, float]]]:
    while not file.exists():
        yield []
    with file.open("rb") as lines:
        rest = b""
        while True:
            *whole, rest = (rest + lines.read()).split(b"\n")
            yield [json.loads(line) for line in whole]


def _lines(file: Path) -> list[dict[str, float]]:
    return next(_new_lines(file))


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a process and its descendants, including terminated children that were waited for."""
    spent = 0.0
    for process in (parent := psutil.Process(root), *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # the process ended meanwhile
            spent += sum(process.cpu_times()[:4])  # user, system, and the same of children that ended
    return spent


def _lags(paths: RunPaths) -> list[int]:
    return [lag for rows in ledgers_after(paths, 0) for lag in rows["policy_lag"].to_pylist()]


def bench_e2e(settings: RunSettings, *, rounds: int, steps: int, arguments: Sequence[str]) -> Outcome:
    """Medians over `rounds` short runs of `entente train`, without first steps, start-up, making models and scoring.

    Raises:
        InputError: `steps` is below 3.
        TrainingError: a run failed.
    """
    if steps < 3:
        raise InputError(f"{steps} steps measure nothing: --steps is at least 3.")
    runs = []
    for number in range(1, rounds + 1):
        reporter().say(f"e2e round {number} of {rounds}: {steps} steps")
        with short_run(settings, arguments, steps) as (run, _):
            runs.append(figures(run))
    return Outcome(benchmark="e2e", metrics={name: median(each[name] for each in runs) for name in runs[0]}, targets={})


def figures(run: RunFigures) -> dict[str, float]:
    step_s = mean(run.settled("time/step_s"))
    return {
        "steps_per_hour": 3600 / step_s,
        "cpu_s_a_step": run.cpu_a_step,
        "decisions_per_s": mean(run.settled("rollout/decisions")) / step_s,
        "trained_a_step": mean(run.settled("train/decisions")),
        "trainer_idle_share": 1 - mean(run.settled("time/train_s")) / step_s,
        "orchestration_share": mean(run.settled("time/orchestration_s")) / step_s,
        "policy_lag_max": float(max(run.lags, default=0)),
    }
