"""A training run of the old way in its own process: `python -m benchmarks.old_way.run SPEC.json`.

As the old system's loop: rollouts of DEPTH steps are in flight while the trainer, another process, computes; a step begins when
all of its rollouts are done; the new version replaces the previous one. Two bugs are not repeated: its queue lost the order of
rollouts on a time-out, and its weights were published a step late. Prints one line of JSON for each step. The engine's threads
are those of `OMP_NUM_THREADS`, the trainer's those of the specification.

The run ends after its budget of seconds, but not before MEASURED_AT_LEAST steps after the first, which warms up.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEPTH = 2
"""Steps of rollouts in flight while the trainer computes."""
MEASURED_AT_LEAST = 5
"""Least number of steps after the first, which warms up."""


def main(spec_file: Path) -> None:
    """Run the specification in a file: the run's `settings`; `cache`, `model` and `folder`; `budget_s`; `trainer_threads`."""
    spec = json.loads(spec_file.read_text())
    shutil.rmtree(spec["folder"], ignore_errors=True)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_train, args=(there, spec), daemon=True)
    child.start()
    there.close()
    try:
        asyncio.run(_run(spec, here))
    finally:
        here.close()
        child.join(timeout=20)


def _train(pipe: Connection, spec: dict[str, Any]) -> None:
    """The trainer process: receives steps and their files, sends versions with wall and CPU seconds; ends with the pipe."""
    os.environ["OMP_NUM_THREADS"] = str(spec["trainer_threads"])  # before torch is imported
    from benchmarks.old_way.learn import Learner
    from training.settings import TrainingSettings

    settings = TrainingSettings.model_validate(spec["settings"]["training"] | {"device": "cpu"})
    learner = Learner(Path(spec["model"]), settings, Path(spec["folder"]) / "adapters")
    pipe.send("ready")
    while True:
        try:
            step, files = pipe.recv()
        except EOFError:
            return
        began, before = time.perf_counter(), time.process_time()
        trained, policy = learner.learn(step, files)
        pipe.send((trained, policy, time.perf_counter() - began, time.process_time() - before))


async def _run(spec: dict[str, Any], pipe: Connection) -> None:
    from benchmarks.old_way.engine import OldEngine
    from benchmarks.old_way.play import OldRollouts
    from pipeline.run_settings import RunSettings
    from state_cache.store import open_cache

    settings, positions = RunSettings.model_validate(spec["settings"]), open_cache(Path(spec["cache"])).train
    model, folder = Path(spec["model"]), Path(spec["folder"])
    engine = OldEngine(model, settings.inference)
    rollouts = OldRollouts(model, engine, settings.rollouts, positions, settings.seed, folder)
    await engine.inner.start()
    await asyncio.to_thread(pipe.recv)
    try:
        await _steps(spec["budget_s"], engine, rollouts, pipe)
    finally:
        await engine.inner.close()


async def _steps(budget_s: float, engine: Any, rollouts: Any, pipe: Connection) -> None:
    """Steps until the run may end."""
    in_flight: dict[int, asyncio.Task[Any]] = {}
    began = last = time.perf_counter()
    last_cpu = time.process_time()
    for step in itertools.count(1):
        for ahead in range(step, step + DEPTH + 1):
            if ahead not in in_flight:
                in_flight[ahead] = asyncio.create_task(rollouts.roll_out(ahead))
        files = rollouts.write(step, await in_flight.pop(step))
        in_flight[step + DEPTH + 1] = asyncio.create_task(rollouts.roll_out(step + DEPTH + 1))
        pipe.send((step, files))
        trained, policy, train_s, cpu_s = await asyncio.to_thread(pipe.recv)
        await engine.publish(replace(policy, version=step))
        now, now_cpu = time.perf_counter(), time.process_time()
        figures = {"wall_s": now - last, "cpu_s": now_cpu - last_cpu + cpu_s, "train_s": train_s}
        sys.stdout.write(json.dumps({"step": step, "trained": trained} | figures) + "\n")
        sys.stdout.flush()
        last, last_cpu = now, now_cpu
        if now - began >= budget_s and step > MEASURED_AT_LEAST:
            break
    for task in in_flight.values():
        task.cancel()
    await asyncio.gather(*in_flight.values(), return_exceptions=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
