"""Growth with the steps of a run: time of a step, memory of its processes, files.

One run of `entente train` is measured at several steps: its flow, trainer, engine, store, W&B folder and Prefect server are
those of the `laptop` preset, and Prefect's database is its own. Two start groups of four forks make a step short. The learning
rate is so small that the policy stays near the base model: else games become longer or shorter, and steps could not be
compared.

Times are medians over the `WINDOW` steps up to a size, or over half of the steps if there are fewer. Memory of flow and trainer
is resident memory (RSS) as the run logs it after a step, a median over ten steps; it counts mapped shards. `processes_mb` is
the proportional memory (PSS, Linux only) of all processes at one moment; shared pages count once.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from benchmarks.entente_run import RunFigures, run_entente
from reports.growth import Growth
from telemetry.progress import reporter

MILESTONES, QUICK_MILESTONES = (20, 200, 2000), (20, 200)
SETTLED = 30
"""Step from which memory may no longer grow: libraries are loaded, and pools are filled."""
WINDOW = 50
MEMORY_WINDOW = 10
SMALL_STEPS = (
    *("--rollouts.start-groups", "2", "--rollouts.forks-per-group", "4", "--rollouts.horizon-years", "1"),
    *("--training.learning-rate", "1e-6", "--evaluation.positions", "2", "--telemetry.no-report"),
)
FIGURES = {
    "step_s": "time of a step, s",
    "cpu_s": "CPU time of a step, s",
    "flow_mb": "flow, MB RSS",
    "trainer_mb": "trainer, MB RSS",
    "processes_mb": "all processes, MB PSS",
    "files": "number of files",
    "files_mb": "size of files, MB",
    "prefect_mb": "Prefect's database, MB",
}
_MIB = 2**20 / 1e6  # MB
_SECONDS_A_STEP = 5.0
"""A run that takes longer is ended."""


def measure_steps(
    arguments: Sequence[str], runs_root: Path, milestones: Sequence[int], *, settled: int = SETTLED
) -> tuple[Growth, float | None]:
    """Train one run and measure it at each of `milestones`.

    Args:
        arguments: arguments of `entente train`. Flags win over `SMALL_STEPS`, config files do not.
        runs_root: folder of all runs, absolute; models and positions lie there, or are made.

    Returns:
        The growth, and by how many MB the resident memory of flow and trainer together grew from step `settled` to the last; None
        if the run has no such step.

    Raises:
        TrainingError: the run failed.
    """
    last, name = max(milestones), f"bench-growth-{os.getpid()}"
    seen: dict[int, dict[str, float]] = {}
    with TemporaryDirectory(prefix="entente-bench-") as scratch:
        home = Path(scratch)

        def look(step: int, pid: int) -> None:
            reporter().stage(f"steps of a run, {last} in all", step, last)
            if step in milestones:
                number, files_mb = files_of(runs_root / name)
                seen[step] = {"files": number, "files_mb": files_mb, "prefect_mb": files_of(home / ".prefect")[1]}
                seen[step] |= processes_mb(pid)
                reporter().say(f"step {step:,} of {last:,}: {number:,} files, {files_mb:,.1f} MB")

        words = [*SMALL_STEPS, *arguments, "--steps", str(last)]
        try:
            run = run_entente(words, runs_root, name, timeout_s=600 + _SECONDS_A_STEP * last, alone_in=home, on_step=look)
        finally:
            shutil.rmtree(runs_root / name, ignore_errors=True)
    points = {step: step_figures(run, step) | seen.get(step, {}) for step in milestones}
    growth = Growth(axis="steps", figures=FIGURES, points=points)
    return growth, memory_growth_mb(run, settled, last) if settled < last else None


def step_figures(run: RunFigures, step: int) -> dict[str, float]:
    """Times of the steps up to `step`, and memory of flow and trainer. The first step, which warms up, is never counted."""
    count = min(WINDOW, max(1, step // 2))
    times = [each["time/step_s"] for each in run.steps[step - count : step]]
    cpu_s = run.cpu_s[min(step, len(run.cpu_s)) - 1] - run.cpu_s[step - count - 1]
    return {
        "step_s": median(times),
        "cpu_s": cpu_s / count,
        "flow_mb": _resident_mb(run.steps, "memory/flow_mib", step),
        "trainer_mb": _resident_mb(run.steps, "memory/trainer_mib", step),
    }


def memory_growth_mb(run: RunFigures, settled: int, last: int) -> float:
    """MB by which the resident memory of flow and trainer together grew between two steps."""
    names = ("memory/flow_mib", "memory/trainer_mib")
    before, after = (sum(_resident_mb(run.steps, name, step) for name in names) for step in (settled, last))
    return after - before


def _resident_mb(steps: Sequence[Mapping[str, float]], name: str, step: int) -> float:
    """A memory metric over the steps up to `step`, MB."""
    return _MIB * median(each[name] for each in steps[max(0, step - MEMORY_WINDOW) : step])


def files_of(folder: Path) -> tuple[int, float]:
    """Number and MB of the files below a folder. Files that are removed meanwhile are left out."""
    sizes: list[int] = []
    for path, _, names in os.walk(folder):
        for file in names:
            with suppress(FileNotFoundError):
                sizes.append(os.stat(os.path.join(path, file), follow_symlinks=False).st_size)
    return len(sizes), sum(sizes) / 1e6


def processes_mb(root: int) -> dict[str, float]:
    """Proportional memory (PSS) of a process and its descendants as `processes_mb`; empty where the system has no PSS."""
    found = []
    for process in (parent := psutil.Process(root), *parent.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # the process ended meanwhile
            found.append(process.memory_full_info())
    if not all(hasattr(each, "pss") for each in found):
        return {}
    return {"processes_mb": sum(each.pss for each in found) / 1e6}
