"""Small real runs of `entente train` with the recommended settings, in processes of their own: whole, and killed in a step."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.entente_run import RunFigures, run_entente, train_command
from pipeline.run_settings import preset_names
from smoke.job import Job, StageFailed, figures_so_far
from smoke.models import TINY, model_folder
from smoke.recommend import as_toml, base_preset, recommend
from storage.runs import RunPaths

STEPS = 3
_LIMIT_S = 3000.0
_SMALL = """
steps = {steps}
seed = 13
[cache]
train_snapshots = 16
held_out_snapshots = 8
[rollouts]
start_groups = {groups}
forks_per_group = {forks}
[pipeline]
buffer_depth = 1
deterministic = true
[evaluation]
positions = 4
powers_per_position = 1
bootstrap = 100
[telemetry]
wandb = "disabled"
report = false
"""
"""Laid over the recommended settings: a run of few rows. Rows are drawn while the step before is trained on."""


def train(job: Job, run: str, *more: str) -> RunFigures:
    """Run `entente train` to its end.

    Raises:
        TrainingError: it failed; the message ends with the last line of its log.
    """
    arguments = more if "--resume" in more else (*_arguments(job), *more)
    return run_entente(arguments, job.runs, run, timeout_s=_LIMIT_S, alone_in=job.folder)


def forget(job: Job, run: str) -> RunPaths:
    """Remove the files of a run that an earlier start left; returns its paths."""
    paths = RunPaths(job.runs / run)
    shutil.rmtree(paths.root, ignore_errors=True)
    return paths


def kill_in_step(job: Job, run: str, step: int) -> None:
    """Start a run and kill its process, with SIGKILL, after it has chosen the rows of `step`.

    Raises:
        StageFailed: the run ended before, or what it started outlives it.
    """
    paths = forget(job, run)
    command, environment = train_command(_arguments(job), job.runs, run, alone=True)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, cwd=job.folder)
    family: list[psutil.Process] = []
    until = time.monotonic() + _LIMIT_S
    try:
        while child.poll() is None and time.monotonic() < until and _recorded(paths.ledger) < step:
            time.sleep(0.02)
        if child.poll() is None:
            family = psutil.Process(child.pid).children(recursive=True)
    finally:
        child.kill()
        child.wait()
    if child.returncode != -signal.SIGKILL:
        raise StageFailed(f"the run ended with exit code {child.returncode} before it could be killed in step {step}")
    _, alive = psutil.wait_procs(family, timeout=60)
    if alive:
        raise StageFailed(f"{len(alive)} processes outlive the killed run, among them {' '.join(alive[0].cmdline()[:4])}")


def weights(paths: RunPaths) -> list[bytes]:
    """The adapter of each version, byte for byte."""
    return [(paths.adapter(version) / "adapter_model.safetensors").read_bytes() for version in range(1, STEPS + 1)]


def _recorded(ledger: Path) -> int:
    return len(list(ledger.rglob("step-*.arrow")))


def _arguments(job: Job) -> Sequence[str]:
    """Preset, recommended settings and a small size, written to files of the job."""
    on_card = job.device == "cuda"
    advised, small = job.folder / "advised.toml", job.folder / "small.toml"
    advised.write_text(as_toml(recommend(job.device, figures_so_far(job))))
    recipe = "".join(f"{name} = {json.dumps(value)}\n" for name, value in TINY.model_dump().items())
    sizes = {"steps": STEPS, "groups": 8 if on_card else 4, "forks": 8 if on_card else 4}
    small.write_text(_SMALL.format(**sizes) + f"[tiny_model]\n{recipe}")
    preset = base_preset(preset_names(), figures_so_far(job).get("card", {}), job.device)
    words = ["--preset", preset, "--config", str(advised), "--config", str(small)]
    if job.model or job.shape != "tiny":
        words += ["--inference.model", str(model_folder(job))]
    return words
