"""`producers`: rollouts spread over processes, beside those of one process with as many cores.

One arm is a producer with an engine of its own on all cores. The other is a producer and an inference worker for each core, by
HTTP. Both are `entente produce` and `entente serve` as a user starts them, each for a run of its own, whose control file this
module writes in place of a trainer. The arms take turns: one plays a fixed number of start groups while the processes of the
other wait. Time counts from the first sign of play to the last shard; CPU time is that of the arm's processes.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.entente_run import tree_cpu_s
from benchmarks.outcome import Outcome, Target
from decoding.model_files import model_fingerprint
from pipeline.rollout_side import side_settings
from pipeline.run_settings import CACHE_FOLDER, MODEL_FOLDER, RunSettings
from records.policy_version import BASE
from storage.control import ControlDesk, ProducerStatus, read_producers
from storage.runs import RunPaths, durable_write
from storage.shards import open_shard
from telemetry.errors import EngineError
from telemetry.progress import reporter

TARGETS = {"spread_over_one": Target(at_least=0.9)}
_STARTS_WITHIN_S = 300.0
_PLAYS_WITHIN_S = 600.0
_POLL_S = 0.1


def bench_producers(*, settings: RunSettings, model: Path, rounds: int, start_groups: int, cores: int) -> Outcome:
    """Measure `rounds` rounds, after one that warms up.

    Args:
        model: folder of the base model.
        start_groups: played in each round by each arm.
        cores: threads of the one process; pairs of a producer and a worker in the other arm.
    """
    taken: dict[str, list[dict[str, float]]] = {"one": [], "spread": []}
    with TemporaryDirectory(prefix="entente-bench-") as scratch, ExitStack() as stack:
        arms = {
            "one": stack.enter_context(_arm(Path(scratch), settings, model, "one", pairs=0, threads=cores)),
            "spread": stack.enter_context(_arm(Path(scratch), settings, model, "spread", pairs=cores, threads=1)),
        }
        for number in range(rounds + 1):
            for name, play in arms.items():
                figures = play(start_groups)
                if number:
                    taken[name].append(figures)
                rate = figures["decisions"] / figures["wall_s"]
                reporter().say(f"producers, round {number} of {rounds}: {name} {rate:.0f} decisions a second")
    return Outcome(benchmark="producers", metrics=spread_figures(taken), targets=TARGETS)


def spread_figures(taken: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """The figures of all rounds, by arm: one, spread. Each round has decisions, wall_s and cpu_s."""

    def rates(arm: str, clock: str) -> list[float]:
        return [each["decisions"] / each[clock] for each in taken[arm]]

    def ratio(clock: str) -> float:
        return median(b / a for a, b in zip(rates("one", clock), rates("spread", clock), strict=True))

    return {
        "spread_over_one": ratio("wall_s"),
        "spread_over_one_cpu": ratio("cpu_s"),
        "decisions_per_s_one": median(rates("one", "wall_s")),
        "decisions_per_s_spread": median(rates("spread", "wall_s")),
        "cpu_ms_per_decision_one": 1e3 / median(rates("one", "cpu_s")),
        "cpu_ms_per_decision_spread": 1e3 / median(rates("spread", "cpu_s")),
    }


@contextmanager
def _arm(
    scratch: Path, settings: RunSettings, model: Path, name: str, *, pairs: int, threads: int
) -> Iterator[Callable[[int], dict[str, float]]]:
    """A run with its producers, and workers if there are pairs; gives a function that plays some start groups and measures."""
    root = scratch / name
    root.mkdir()
    for shared in (MODEL_FOLDER, CACHE_FOLDER):
        (root / shared).symlink_to((settings.runs_root / shared).absolute())
    paths = RunPaths(root / "run").create()
    pipeline = settings.pipeline.model_copy(update={"deterministic": False, "lockstep": False})
    mine = settings.model_copy(update={"run": "run", "runs_root": root, "pipeline": pipeline})
    durable_write(paths.settings, mine.model_dump_json().encode())
    desk = ControlDesk(paths, base_model=model_fingerprint(model), plays=side_settings(paths).plays, quota=0, max_policy_lag=0)
    desk.serve(BASE)
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []

        def begin(*words: str, log: str) -> subprocess.Popen[str]:
            processes.append(stack.enter_context(_process(words, scratch / f"{name}-{log}.log", threads)))
            return processes[-1]

        urls = []
        for number in range(pairs):
            serving = ("serve", "--model", str(model), "--port", "0", "--adapters-root", str(root), "--threads", str(threads))
            urls.append(_address(begin(*serving, *_flags(settings), log=f"serve-{number}")))
        for number in range(max(1, pairs)):
            words = ("produce", "--run", "run", "--runs-root", str(root), "--name", f"p{number}", "--threads", str(threads))
            begin(*words, *(("--urls", urls[number]) if urls else ()), log=f"produce-{number}")
        _wait_until(lambda: len(_at_work(paths)) == max(1, pairs) and all(each.state == "waiting" for each in _at_work(paths)),
                    _STARTS_WITHIN_S, processes)  # fmt: skip

        def play(start_groups: int) -> dict[str, float]:
            before, rows = sum(each.published for each in _at_work(paths)), _rows(paths)
            desk.ask(quota=desk.control.quota + -(-start_groups // max(1, pairs)), gather=False)
            cpu_s = sum(tree_cpu_s(each.pid) for each in processes)
            _wait_until(lambda: any(each.in_flight for each in _at_work(paths)), _PLAYS_WITHIN_S, processes)
            began = time.perf_counter()
            _wait_until(
                lambda: sum(each.published for each in _at_work(paths)) - before >= start_groups, _PLAYS_WITHIN_S, processes
            )
            wall_s = time.perf_counter() - began
            spent = sum(tree_cpu_s(each.pid) for each in processes) - cpu_s
            return {"decisions": float(_rows(paths) - rows), "wall_s": wall_s, "cpu_s": spent}

        yield play
        desk.stop("the benchmark is over")


def _flags(settings: RunSettings) -> tuple[str, ...]:
    """Settings of the engine that differ from those of `entente serve`."""
    inference = settings.inference
    names = ("adapters", "dtype", "max_model_length", "engine")
    return tuple(word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(inference, name))))


@contextmanager
def _process(words: tuple[str, ...], log: Path, threads: int) -> Iterator["subprocess.Popen[str]"]:
    """`entente WORDS` as long as the block lasts; its standard output is a pipe."""
    path = os.pathsep.join(each for each in sys.path if each)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ENTENTE_")}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.main", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _address(worker: "subprocess.Popen[str]") -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if "http://" not in line:
        raise EngineError("an inference worker of the benchmark did not start: run `entente serve` to see why")
    return "http://" + line.rsplit("http://", 1)[1].strip()


def _wait_until(done: Callable[[], bool], seconds: float, processes: list["subprocess.Popen[str]"]) -> None:
    until = time.monotonic() + seconds
    while not done():
        ended = next((each for each in processes if each.poll() is not None), None)
        if ended is not None or time.monotonic() > until:
            what = f"`{' '.join(map(str, ended.args[3:]))}` ended" if ended else f"it took more than {seconds:g} s"  # type: ignore[index, misc]
            raise EngineError(f"the producers of the benchmark do not play: {what}")
        time.sleep(_POLL_S)


def _at_work(paths: RunPaths) -> list[ProducerStatus]:
    return [each for each in read_producers(paths)[0] if each.at_work()]


def _rows(paths: RunPaths) -> int:
    """Decisions in all shards."""
    files = [file for file in paths.shards.rglob("*.arrow") if not file.name.endswith(".plies.arrow") and file.name[0] != "."]
    return sum(open_shard(file).num_rows for file in files)
