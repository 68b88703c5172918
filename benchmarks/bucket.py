"""`bucket`: steps of a run that lives in an object store, beside those of a run in a local folder.

Each arm is a whole `entente train` with the same settings; the arms take turns. Time of a step is the median over all steps but
the first. `bucket_step_cost` is the median over rounds of the bucket's time over the folder's, less one; `bucket_cpu_cost` the
same of the CPU seconds of all processes of the run, without those of the store.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from uuid import uuid4

from benchmarks.entente_run import run_entente
from benchmarks.outcome import Outcome, Target
from telemetry.progress import reporter

TARGETS = {"bucket_step_cost": Target(at_most=0.15)}


def bench_bucket(arguments: Sequence[str], folder: Path, bucket: Path, *, rounds: int) -> Outcome:
    """Measure `rounds` rounds of both arms.

    Args:
        arguments: of `entente train`.
        folder: folder of runs on this machine.
        bucket: mounted folder of a bucket (`storage.run_roots.located`). The runs stay there.
    """
    seconds: dict[str, list[float]] = {"folder": [], "bucket": []}
    cpu: dict[str, list[float]] = {"folder": [], "bucket": []}
    for number in range(1, rounds + 1):
        for arm, root in (("folder", folder), ("bucket", bucket)):
            found = run_entente(arguments, root, f"bench-{arm}-{uuid4().hex[:8]}")
            seconds[arm].append(median(found.settled("time/step_s")))
            cpu[arm].append(found.cpu_a_step)
            reporter().say(f"round {number} of {rounds}, {arm}: {seconds[arm][-1]:.2f} s a step, {cpu[arm][-1]:.2f} CPU s")
    return Outcome(benchmark="bucket", metrics=bucket_figures(seconds, cpu), targets=TARGETS)


def bucket_figures(seconds: dict[str, list[float]], cpu: dict[str, list[float]]) -> dict[str, float]:
    """The figures of the rounds' seconds a step and CPU seconds a step, by arm."""
    return {
        "bucket_step_cost": _cost(seconds),
        "bucket_cpu_cost": _cost(cpu),
        "folder_step_s": median(seconds["folder"]),
        "bucket_step_s": median(seconds["bucket"]),
    }


def _cost(taken: dict[str, list[float]]) -> float:
    return median(bucket / folder for folder, bucket in zip(taken["folder"], taken["bucket"], strict=True)) - 1
