"""A training run of the old way in its own process: `python -m benchmarks.old_way.run SPEC.json`.

As the old system's loop: rollouts of DEPTH steps are in flight while the trainer, another process, computes; a step begins when
all of its rollouts are done; the new version replaces the previous one. Two bugs are not repeated: its queue lost the order of
rollouts on a time-out, and its weights were published a step late. Prints one line of JSON for each step, then the scores. The
engine's threads are those of `OMP_NUM_THREADS`, the trainer's those of the specification.

The run ends after its budget of seconds, but not before MEASURED_AT_LEAST steps after the first, which warms up, and not before
the scored step. Scored are the base, the newest version within the budget, and the version of the scored step. The budget counts
from the start of the first step, as the seconds of the other arm do.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEPTH = 2
"""Steps of rollouts in flight while the trainer computes."""
MEASURED_AT_LEAST = 5
"""Least number of steps after the first, which warms up."""
_AFTER_ALL = 1_000_000
"""Number under which the first scored version is served."""


def main(spec_file: Path) -> None:
    """Run the specification in a file: the run's `settings`; `cache`, `model` and `folder`; `budget_s`; `scored_step` (0: no
    scores); `trainer_threads`.
    """
    spec = json.loads(spec_file.read_text())
    shutil.rmtree(spec["folder"], ignore_errors=True)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_train, args=(there, spec), daemon=True)
    child.start()  # before vLLM is imported and changes the environment
    there.close()
    try:
        asyncio.run(_run(spec, here))
    finally:
        here.close()
        child.join(timeout=20)


def _print(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


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

    settings, positions = RunSettings.model_validate(spec["settings"]), open_cache(Path(spec["cache"]))
    model, scored = Path(spec["model"]), spec["scored_step"]
    engine = OldEngine(model, settings.inference)
    rollouts = OldRollouts(model, engine, settings.rollouts, positions.train, settings.seed, Path(spec["folder"]))
    await engine.start()
    await asyncio.to_thread(pipe.recv)
    try:
        found = {"base": await _score(settings, positions, rollouts)} if scored else {}
        ended = await _steps(spec, engine, rollouts, pipe)
        if scored:
            versions = {"span": newest_within(spec["budget_s"], ended), "steps_scored": ended[scored - 1][1]}
            for number, (name, policy) in enumerate(versions.items()):
                if policy is not None:
                    await engine.publish(replace(policy, version=_AFTER_ALL + number))
                found[name] = found["base"] if policy is None else await _score(settings, positions, rollouts)
            _print(**found)
    finally:
        await engine.close()


async def _score(settings: Any, positions: Any, rollouts: Any) -> dict[str, Any]:
    """Mean centres gained on held-out positions, measured as for a run, and the interval (`ci`; None for too few games)."""
    from benchmarks.old_way.play import ask
    from evaluation.strength import measure_strength

    class OldWay:
        async def decide(self, request: Any) -> list[str]:
            name = f"{request.game}/0/{request.ply}/{request.power}"
            ((_, orders),) = await rollouts.draw([ask(name, request.board, request.legal, settings.rollouts.temperature)])
            return orders

    evaluation = settings.evaluation
    found = await measure_strength("old way", evaluation.opponents[0], positions.held_out, evaluation, decider=OldWay())
    return {"mean": found.mean, "ci": found.estimate.rounded()}


async def _steps(spec: dict[str, Any], engine: Any, rollouts: Any, pipe: Connection) -> list[tuple[float, Any]]:
    """Steps until the run may end; returns each one's version, with the seconds from the start of the first step to its end."""
    in_flight: dict[int, asyncio.Task[Any]] = {}
    ended: list[tuple[float, Any]] = []
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
        ended.append((now - began, policy))
        spent = {"wall_s": now - last, "cpu_s": now_cpu - last_cpu + cpu_s, "train_s": train_s}
        _print(step=step, ended_s=now - began, trained=trained, **spent)
        last, last_cpu = now, now_cpu
        if may_end(step, now - began, budget_s=spec["budget_s"], scored_step=spec["scored_step"]):
            break
    for task in in_flight.values():
        task.cancel()
    await asyncio.gather(*in_flight.values(), return_exceptions=True)
    return ended


def may_end(step: int, spent_s: float, *, budget_s: float, scored_step: int) -> bool:
    """Whether the run may end after `step`, `spent_s` seconds after the start of its first step."""
    return spent_s >= budget_s and step >= max(1 + MEASURED_AT_LEAST, scored_step)


def newest_within(budget_s: float, ended: Sequence[tuple[float, Any]]) -> Any:
    """The version of the last step within the budget; None if no step ended within it.

    Args:
        ended: for each step the seconds from the start of the first step to its end, and its version.
    """
    return next((policy for spent_s, policy in reversed(ended) if spent_s <= budget_s), None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
